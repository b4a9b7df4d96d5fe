"""CPU time, memory and starts of an action are what it really used, or are marked as lower
bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import product

import msgspec
import pytest
from helpers.builders import World
from helpers.executor_rig import Rig
from helpers.hostile_rig import reason_to_skip
from test_prefetch import SHORT, world

from tangram_hpc.accounting.fields import as_json, choose_fields
from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall

SECOND = 10**9
LIMITS = (SECOND * 3 // 2, 6 * SECOND, 24 * SECOND)  # a longer one where others have the cores
COMPILER = shutil.which("cc") or shutil.which("gcc")
# Each leaves a mark with the CPU time that it has used, every 0.05 s of it.
SPIN = r"""
import os, sys, time
told, name = 0.0, sys.argv[1]
while True:
    sum(range(20000))
    if time.process_time() - told > 0.05:
        told = time.process_time()
        with open(name + ".new", "w") as file:
            file.write(str(told))
        os.rename(name + ".new", name)
"""


# in every run each way once, by which a command is served, with a cgroup and without one
OFTEN = {("process", "", "plain"), ("process", "affinity", "python"), ("bwrap", "", "python"),
         ("bwrap", "affinity", "plain")}
COMBINATIONS = [
    pytest.param(each, id=f"{each[0]}-{each[1] or 'best'}-{each[2]}",
                 marks=[] if each in OFTEN else [pytest.mark.long])
    for each in product(("process", "bwrap"), ("", "affinity"), ("plain", "python"))]


@pytest.fixture(scope="module", params=COMBINATIONS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    backend, enforcement, way = request.param
    if why := reason_to_skip(backend):
        pytest.skip(why)
    made = Rig(tmp_path_factory.mktemp("rig"), trusted=False, isolation=backend,
               enforcement=enforcement, compiled=way == "plain", again=way == "plain")
    made.open(1)
    yield made
    made.close()


def test_cpu_time_of_children_of_a_killed_command_is_counted(rig: Rig) -> None:
    """The shell waits for neither child: one dies with it, one is in a process session of its
    own."""
    call = ExecCall(shell="rm -f one two; python3 -c \"$SPIN\" one & "
                          "setsid python3 -c \"$SPIN\" two & wait", env={"SPIN": SPIN})
    for limit_ns in LIMITS:
        lease = rig.begin(call, Kind.EXEC, session=1, timeout_ns=limit_ns)
        outcome, _, _ = rig.end(lease)
        assert outcome.state is ActionState.TIMEOUT
        used = 0.0
        for name in ("one", "two"):
            read, text = rig.file(name)
            used += float(text.data) if read.state is ActionState.COMPLETED else 0.0
        if used > 0.2:
            break
    assert used > 0.2, "the children got no CPU time"
    # what /proc tells is in ticks of 10 ms, for user and system time each
    assert outcome.cpu_ns / SECOND > used - 0.1, (outcome, used)
    assert outcome.cpu_ns < 2.5 * outcome.exec_ns
    # without a cgroup a process's time until its very end is not known
    counted = outcome.enforcement.startswith("cgroup")
    assert ("cpu" in outcome.lower_bounds) == (not counted), outcome


BURN = ("import time; t = time.process_time()\nwhile time.process_time() < t + {}: pass\n"
        "open('done', 'w')")


@pytest.mark.parametrize("seconds", [0.15, 0.6])
def test_cpu_time_of_what_ended_unseen_is_counted_or_missing_with_a_mark(
        rig: Rig, seconds: float) -> None:
    """The parent of the process that needs the time has ended before it. The library serves the
    shorter one whole, and hands the longer one to Python while it runs."""
    rig.file("burn.py", BURN.format(seconds).encode())
    outcome, _ = rig.shell("rm -f done; (setsid python3 burn.py &); "
                           "while [ ! -e done ]; do sleep 0.01; done; sleep 0.05", session=1)
    assert outcome.state is ActionState.COMPLETED
    if "cpu" not in outcome.lower_bounds:
        assert outcome.cpu_ns / SECOND > seconds, outcome
    assert outcome.enforcement.startswith("cgroup") <= ("cpu" not in outcome.lower_bounds), outcome
    assert outcome.cpu_ns < 2.5 * outcome.exec_ns


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A program of less than 2 MiB that can be told to live for a while first."""
    if COMPILER is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.c").write_text("#include <unistd.h>\n#include <stdlib.h>\n"
                                   "int main(int n, char **v)"
                                   "{ if (n > 1) usleep(1000 * atoi(v[1])); return 0; }\n")
    subprocess.run([COMPILER, "-o", folder / "tiny", folder / "tiny.c"], check=True)
    return (folder / "tiny").read_bytes()


@pytest.mark.parametrize("ms", ["0", "300"])
def test_the_memory_of_a_small_program_is_not_that_of_its_sandbox(
        rig: Rig, tiny: bytes, ms: str) -> None:
    rig.file("tiny", tiny)
    rig.shell("chmod 700 tiny", session=1)
    outcome, _ = rig.exec("./tiny", ms, session=1)
    assert outcome.state is ActionState.COMPLETED
    assert 0 < outcome.maxrss_kib < 4000, outcome
    assert "maxrss" in outcome.lower_bounds, "the kernel does not report it"
    if ms != "0":
        assert outcome.maxrss_kib > 300, "it lived long enough to be measured"


def test_the_memory_of_a_large_program_is_exact(rig: Rig) -> None:
    outcome, _ = rig.exec("/usr/bin/python3", "-c", "x = bytearray(b'x') * (64 << 20)", session=1)
    assert outcome.state is ActionState.COMPLETED
    assert 64 << 10 < outcome.maxrss_kib < 90 << 10
    assert "maxrss" not in outcome.lower_bounds


# ---- functions ----


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("runner"))
    yield made
    made.close()


def test_cpu_time_of_children_that_outlive_a_function_is_counted(
        runner: Rig) -> None:
    def leaves_one() -> float:
        import os

        into, out = os.pipe()
        if os.fork() == 0:
            told = False
            while True:
                if not told and time.process_time() > 0.3:
                    told = bool(os.write(out, b"x"))
        os.read(into, 1)
        return 0.3

    outcome, _, _ = runner.function(leaves_one)
    assert outcome.state is ActionState.COMPLETED
    assert outcome.cpu_ns > 0.29 * SECOND and "cpu" not in outcome.lower_bounds, outcome


def test_cpu_time_and_memory_of_a_killed_function_are_counted(runner: Rig) -> None:
    def spins() -> None:
        import os

        os.fork()
        while True:
            pass

    runner.value(os.getpid)  # what its process used before is not the next call's
    for limit_ns in LIMITS:
        outcome, _, _ = runner.function(spins, timeout_ns=limit_ns)
        assert outcome.state is ActionState.TIMEOUT
        if outcome.cpu_ns > 0.2 * SECOND:
            break
    assert 0.2 * SECOND < outcome.cpu_ns < 2.5 * outcome.exec_ns, outcome
    assert outcome.lower_bounds == ("cpu", "maxrss") and outcome.maxrss_kib > 5000


def test_maxrss_of_a_function_excludes_the_previous_function(runner: Rig) -> None:
    large = runner.function(lambda: len(bytearray(b"x") * (96 << 20)))[0]
    small = runner.function(lambda: 1)[0]
    assert large.maxrss_kib > 96 << 10
    assert small.maxrss_kib < 64 << 10, (large.maxrss_kib, small.maxrss_kib)


# ---- starts, and what accounting shows ----


def test_a_lower_bound_is_marked_in_the_records() -> None:
    w = World()
    w.node(cpus=1)
    w.submit(1)
    w.plan()
    (lease,) = w.ledger.leases
    w.happen(ev.LeaseFinished(5, lease, Outcome(
        ActionState.TIMEOUT, cpu_ns=3 * SECOND, maxrss_kib=99, at_least=3), True))
    (record,) = fold(w.events).records.values()
    columns = {f.name: f.text(record) for f, _ in choose_fields("TotalCPU,MaxRSS,Restarts")}
    assert columns == {"TotalCPU": ">00:00:03.000", "MaxRSS": ">99K", "Restarts": "0"}
    assert as_json(record)["lower_bounds"] == ["cpu", "maxrss"]


def test_restarts_of_prefetched_actions_count_where_their_node_was_lost() -> None:
    """A prefetched lease counts as no start, unless its node cannot be asked. Journals of earlier
    releases gave such a lease back, so that the number of restarts is a lower bound."""
    w = world("fcfs:1")
    first, second, third = (w.submit(profile=SHORT, attempts=3) for _ in range(3))
    w.plan()
    w.happen(ev.LeaseReturned(w.now, w.lease_of(third)))  # by its worker: it had not begun
    lost = w.lease_of(second)
    w.happen(ev.NodeLost(w.now, 1, "gone"))
    w.node(cpus=3)
    w.plan()
    for action in (first, second, third):
        w.finish(action)
    earlier = [ev.LeaseReturned(event.at, lost)
               if isinstance(event, ev.LeaseFinished) and event.lease == lost
               else msgspec.structs.replace(event, attempt=1)
               if isinstance(event, ev.LeaseGranted) and event.action == second
               else event for event in w.events]
    (restarts, _), = choose_fields("Restarts")
    for events, second_ones in ((w.events, "1"), (earlier, ">0")):
        records = fold(events).records
        assert [restarts.text(records[a]) for a in (first, second, third)] == [
            "1", second_ones, "0"]
        assert [as_json(records[a])["attempt_at_least"] for a in (first, second, third)] == [
            False, second_ones == ">0", False]
