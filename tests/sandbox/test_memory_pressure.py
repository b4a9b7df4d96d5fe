"""What a node does when its memory runs out, and how it knows. Processes are real processes with
real memory; only how much the node has left is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.executor_rig import Rig

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall
from tangram_hpc.protocol.process_frames import INIT, RUNNER, FreezeBackground
from tangram_hpc.resources import memory, process_tree
from tangram_hpc.sandbox.manager.memory_pressure import MemoryPressure
from tangram_hpc.sandbox.manager.sandbox_executor import SandboxExecutor
from tangram_hpc.sandbox.process.sandbox_processes import memory_kib

MIB = 1 << 20
EATER = "import sys; x = bytearray(int(sys.argv[1]) << 20); print(flush=True); sys.stdin.read()"


class Processes:
    """Processes that hold so much memory, as processes under leases."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def attempt(self, lease: int, mib: int, kind: str = INIT) -> Any:
        run = subprocess.Popen([sys.executable, "-c", EATER, str(mib)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()
        self.running.append(run)
        process = SimpleNamespace(pid=run.pid, kind=kind,
                               send=lambda message: self.sent.append((lease, message)))
        return SimpleNamespace(process=process, live=True, order=SimpleNamespace(lease=lease))

    def end(self) -> None:
        for run in self.running:
            run.communicate(b"")


@pytest.fixture
def processes() -> Iterator[Processes]:
    one = Processes()
    yield one
    one.end()


Told = list[tuple[int, ActionState, str]]


@pytest.fixture
def ended() -> Told:
    return []


def pressure(ended: Told, watches: bool = False) -> MemoryPressure:
    return MemoryPressure(watches, lambda *what: ended.append(what))


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how much is left, in MiB."""
    return lambda mib: monkeypatch.setattr(memory, "left_mib", lambda: mib)


PLENTY, NONE = 1 << 20, 0


def test_no_action_is_ended_while_memory_is_left(
        processes: Processes, ended: Told, left: Callable[[int], None]) -> None:
    left(PLENTY)
    pressure(ended).look([(processes.attempt(1, 40), 1)], list)
    assert ended == [] and processes.sent == []


def test_background_processes_are_frozen_first_then_the_action_furthest_above_its_request_ends(
        processes: Processes, ended: Told, left: Callable[[int], None]) -> None:
    within, little = processes.attempt(1, 90), processes.attempt(2, 40)
    most = processes.attempt(3, 60)
    attempts = [(within, 300), (little, 30), (most, 20)]
    idle = [processes.attempt(9, 1).process]
    one = pressure(ended)
    left(NONE)
    one.look(attempts, lambda: idle)
    assert processes.sent == [(9, FreezeBackground())] and ended == []
    one.look(attempts, lambda: idle)
    assert [lease for lease, _, _ in ended] == [3] and len(processes.sent) == 1
    assert ended[0][1] is ActionState.OUT_OF_MEMORY
    assert ended[0][2].startswith("mem: the node ran out of memory; ")
    assert "20 MiB asked" in ended[0][2]
    most.live = False
    one.look(attempts, lambda: idle)
    assert [lease for lease, _, _ in ended] == [3, 2], "one a look"
    little.live = False
    one.look(attempts, lambda: idle)
    assert len(ended) == 2, "who stays within what it asked for is never ended"


def test_after_memory_recovers_background_processes_are_frozen_first_again(
        processes: Processes, ended: Told, left: Callable[[int], None]) -> None:
    over, idle = (processes.attempt(1, 40), 5), [processes.attempt(9, 1).process]
    one = pressure(ended)
    for mib in (NONE, PLENTY, NONE):
        left(mib)
        one.look([over], lambda: idle)
    assert processes.sent == [(9, FreezeBackground())] * 2 and ended == []


@pytest.mark.parametrize("watches", [True, False])
def test_functions_are_held_to_their_memory_request_only_without_a_cgroup_limit(
        watches: bool, processes: Processes, ended: Told, left: Callable[[int], None]) -> None:
    left(PLENTY)
    attempts = [(processes.attempt(1, 80, RUNNER), 40), (processes.attempt(2, 5, RUNNER), 200),
            (processes.attempt(3, 80, RUNNER), 0), (processes.attempt(4, 80, INIT), 40)]
    pressure(ended, watches).look(attempts, list)
    assert [lease for lease, _, _ in ended] == ([1] if watches else [])
    assert all(state is ActionState.OUT_OF_MEMORY for _, state, _ in ended)


def test_an_action_without_a_memory_request_is_ended_when_the_node_runs_out(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real worker; its neighbour, who stays within what it asked for, goes on."""
    rig = Rig(tmp_path, enforcement="affinity")
    try:
        rig.open(1, mem_mib=200)
        rig.open(2)
        eat = f"import time; x = bytearray({64 * MIB}); time.sleep(600)"
        call = ExecCall(argv=(sys.executable, "-c", eat))
        calm, greedy = (rig.begin(call, Kind.EXEC, session=session) for session in (1, 2))
        processes = [rig.session(session).process for session in (1, 2)]
        rig.until(lambda: all(memory_kib(process_tree.descendants(h.pid), 0) > 64 << 10
                              for h in processes))
        monkeypatch.setattr(memory, "left_mib", lambda: 0)
        outcome, _, _ = rig.end(greedy)
        assert outcome.state is ActionState.OUT_OF_MEMORY and "the node ran out" in outcome.reason
        assert calm not in rig.done
        rig.executor.kill(calm, ActionState.CANCELLED, "")
        rig.end(calm)
    finally:
        rig.close()


# ---- how much there is -------------------------------------------------------------------------


def cgroup_tree(monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    """A /proc/self/cgroup and a cgroup file system; all else is the machine's."""
    real = memory._read

    def read(path: Path) -> str:
        if str(path) == "/proc/self/cgroup":
            return own
        if str(path).startswith("/sys/fs/cgroup"):
            return files.get(str(path.relative_to("/sys/fs/cgroup")), "")
        return real(path)

    monkeypatch.setattr(memory, "_read", read)


def test_total_and_free_memory_are_those_of_meminfo() -> None:
    told = {line.split(":")[0]: int(line.split()[1]) >> 10
            for line in Path("/proc/meminfo").read_text().splitlines() if line.endswith("kB")}
    assert 0 < memory.total_mib() <= told["MemTotal"] + 1
    assert 0 <= memory.left_mib() <= told["MemTotal"]


def test_the_tightest_parent_cgroup_bounds_memory_and_inactive_cache_counts_as_free(
        monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup_tree(monkeypatch, "0::/slurm/job_1/step_0\n", {
        "slurm/job_1/step_0/memory.max": "max\n", "slurm/job_1/step_0/memory.current": "1\n",
        "slurm/job_1/memory.max": f"{100 * MIB}\n", "slurm/job_1/memory.current": f"{90 * MIB}\n",
        "slurm/job_1/memory.stat": f"anon 5\ninactive_file {30 * MIB}\n",
        "slurm/memory.max": f"{900 * MIB}\n", "slurm/memory.current": f"{90 * MIB}\n"})
    assert memory.total_mib() == 100
    assert memory.left_mib() == 40


def test_memory_limits_of_cgroup_version_1_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup_tree(monkeypatch, "5:cpu,cpuacct:/x\n4:memory:/slurm/job_1\n", {
        "memory/slurm/job_1/memory.limit_in_bytes": f"{64 * MIB}\n",
        "memory/slurm/job_1/memory.usage_in_bytes": f"{60 * MIB}\n",
        "memory/slurm/job_1/memory.stat": f"total_inactive_file {10 * MIB}\n"})
    assert memory.total_mib() == 64
    assert memory.left_mib() == 14


@pytest.mark.parametrize("own, files", [
    ("5:cpu,cpuacct:/x\n4:memory:/slurm/job_1\n0::/\n",
     {"memory/slurm/job_1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
      "memory/memory.oom_control": "oom_kill 9\n"}),
    ("0::/slurm/job_1/step_0\n",  # without the controller in the step: the nearest that counts
     {"slurm/job_1/memory.events": "low 0\noom 5\noom_kill 3\n",
      "slurm/memory.events": "oom_kill 9\n"}),
    ("0::/x\n", {})])  # fmt: skip
def test_kills_for_memory_are_those_of_the_own_cgroup(
        own: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup_tree(monkeypatch, own, files)
    assert memory.oom_kills() == (3 if files else 0)


@pytest.mark.parametrize("asked, peak_mib, state, reason", [
    (450, 450, ActionState.OUT_OF_MEMORY, "mem: more than the 450 MiB asked for"),
    (450, 390, ActionState.OUT_OF_MEMORY, "memory was used up; 390 MiB used, 450 MiB asked for"),
    (0, 390, ActionState.OUT_OF_MEMORY, "memory was used up; 390 MiB used, 0 MiB asked for"),
    (0, None, ActionState.FAILED, "ended by signal 9")])  # fmt: skip
def test_an_action_that_the_kernel_ended_says_whose_limit_was_reached(
        asked: int, peak_mib: int | None, state: ActionState, reason: str) -> None:
    """The limit of the worker's job step is reached by all of its actions together, and the kernel
    then ends the largest one. No group's limit is reached where `peak_mib` is None: someone else
    sent the signal."""
    ended = Outcome(ActionState.FAILED, signal=signal.SIGKILL, reason="ended by signal 9 (SIGKILL)")
    told = _told(_process(int(peak_mib is not None), (peak_mib or 0) << 10), asked, ended)
    assert told.state is state and reason in told.reason


def test_an_action_is_not_blamed_for_what_the_kernel_ended_before_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a child of an earlier action that coped with it, or a background process."""
    rig = Rig(tmp_path, enforcement="counted")
    try:
        rig.open(1)
        rig.executor._counts_ooms, kills = True, 0
        monkeypatch.setattr(type(rig.session(1).process.group), "oom_kills", lambda _: kills)
        assert rig.shell("true", session=1)[0].state is ActionState.COMPLETED
        kills = 1
        assert rig.shell("kill -9 $$", session=1)[0].state is ActionState.FAILED
    finally:
        rig.close()


def test_a_kill_by_the_kernel_that_no_cgroup_of_ours_counts_is_known_by_that_of_the_job_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on most sites, which delegate no cgroup: an action without `mem` fills that of the job
    step. Each kill counts for one action, so that a later SIGKILL of somebody's own stays one."""
    count = tmp_path / "count"
    count.touch()
    monkeypatch.setattr(memory, "oom_kills", lambda: count.stat().st_size)

    def killed(count: str) -> None:
        import os

        with open(count, "a") as file:
            file.write("x")
        os.kill(os.getpid(), 9)

    rig = Rig(tmp_path, enforcement="counted")
    try:
        outcome, _ = rig.shell(f"printf x >>{count}; kill -9 $$")
        assert outcome.state is ActionState.OUT_OF_MEMORY
        assert "the job step's memory was used up" in outcome.reason
        assert rig.shell("kill -9 $$")[0].state is ActionState.FAILED
        outcome, *_ = rig.function(killed, str(count))
        assert outcome.state is ActionState.OUT_OF_MEMORY
    finally:
        rig.close()


def test_only_a_kill_of_the_last_two_checks_ends_an_action(
        ended: Told, left: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier one was that of a process whose action went on without it."""
    kills = 7
    monkeypatch.setattr(memory, "oom_kills", lambda: kills)
    left(PLENTY)
    one = pressure(ended, watches=True)
    one.begin()
    assert not one.take_kill()
    kills += 2
    one.look([], list)
    assert one.take_kill()
    one.look([], list)
    assert not one.take_kill()  # the other one is too old
    kills += 1
    assert one.take_kill() and not one.take_kill()
    one.look([], list)
    assert not one.take_kill()
    assert not pressure(ended).take_kill()  # where each action's cgroup counts its own


@pytest.mark.parametrize("background", ["stop", "run"])
@pytest.mark.parametrize("enforcement", ["", "counted"])
def test_what_an_action_left_ends_with_it_when_it_used_too_much_memory(
        enforcement: str, background: str, tmp_path: Path) -> None:
    """Whether the kernel or the sandbox's init ended the action: its other processes would go on
    with the next actions and use the memory that these need."""
    rig = Rig(tmp_path, enforcement=enforcement)
    try:
        rig.open(1, mem_mib=96, background=background)
        assert rig.shell("sleep 4242 >/dev/null 2>&1 &", session=1)[0].state is (
            ActionState.COMPLETED)
        eat = ("import os, time\nfor _ in range(3):\n if os.fork() == 0: time.sleep(4242)\n"
               f"x = bytearray({256 * MIB})\ntime.sleep(60)")
        outcome, _ = rig.exec(sys.executable, "-c", eat, session=1)
        assert outcome.state is ActionState.OUT_OF_MEMORY
        assert rig.shell("true", session=1)[0].state is ActionState.COMPLETED
        process = rig.session(1).process
        left = [process_tree.read(f"/proc/{pid}/cmdline") or b""
                for pid in process_tree.descendants(process.pid)
                if process_tree.state(pid) not in "ZX"]
        assert not [line for line in left if b"bytearray" in line]
        if rig.executor._counts_ooms:  # the kernel chose the largest, and nobody ended the rest
            assert [line for line in left if b"4242" in line] == [b"sleep\x004242\x00"]
    finally:
        rig.close()


def test_a_kernel_that_counts_no_peak_says_no_figure() -> None:
    ended = Outcome(ActionState.FAILED, signal=signal.SIGKILL)
    assert _told(_process(1, None), 0, ended).reason == (
        "mem: the node's or the job step's memory was used up; 0 MiB asked for")


def _process(kills: int, peak_kib: int | None) -> Any:
    usage = SimpleNamespace(peak_mem_kib=peak_kib)
    group = SimpleNamespace(oom_kills=lambda: kills, usage=lambda: usage)
    return SimpleNamespace(kind=INIT, group=group, oom_kills=0, isolation="bwrap")


def _told(process: Any, asked: int, outcome: Outcome) -> Outcome:
    attempt: Any = SimpleNamespace(
        stop=None, asked_mib=asked, held=True,
        order=SimpleNamespace(action=SimpleNamespace(kind=Kind.EXEC)))
    executor: Any = SimpleNamespace(_counts_ooms=True, _enforcer=SimpleNamespace(name="cgroup1"))
    return SandboxExecutor._checked_outcome(executor, attempt, process, outcome)
