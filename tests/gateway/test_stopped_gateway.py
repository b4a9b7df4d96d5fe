"""A gateway that is stopped, for a while or for good, does not block an MPI job step: the step ends
with its trainers, which continue over the broker's socket, and no trainer is ended earlier."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.gateway_rig import Ranks, Rig
from helpers.slurm_site import Site

from tangram_hpc import LocalCluster
from tangram_hpc.gateway.driver import KEEP_ALIVE
from tangram_hpc.protocol import relay
from tangram_hpc.transport.mpi.mpi_presence import Presence

MPIEXEC = Path(sys.executable).with_name("mpiexec")
TRAINER = """
import os, sys, time, tangram_hpc
note = sys.argv[1]
client = tangram_hpc.connect()
rank = tangram_hpc.comm.rank
open(f"{note}.{rank}.pid", "w").write(str(os.getpid()))
while client.via == "mpi":
    assert client.submit(["true"]).result(60).ok
open(f"{note}.{rank}.socket", "w").close()
if rank:  # the other one leaves long before
    while not os.path.exists(f"{note}.0.over"):
        time.sleep(0.05)
    for _ in range(100):
        assert client.submit(["true"]).result(60).ok
        time.sleep(0.01)
print(f"rank {rank} is done, by {client.via}", flush=True)
client.close()
open(f"{note}.{rank}.over", "w").close()
"""


def pid_of_the_gateway(note: str) -> int:
    deadline = time.monotonic() + 60
    notes = [Path(f"{note}.{rank}.pid") for rank in (0, 1)]
    while not all(path.exists() and path.read_text() for path in notes):
        assert time.monotonic() < deadline, "the ranks did not begin"
        time.sleep(0.05)
    manager = Path(f"/proc/{notes[0].read_text()}/stat").read_text().rpartition(")")[2].split()[1]
    told = subprocess.run(["pgrep", "-P", manager, "-f", "tangram_hpc gateway"],
                          capture_output=True, text=True, check=True)
    return int(told.stdout.split()[0])


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("again", [
    pytest.param(True, id="stopped for a while"),
    pytest.param(False, id="stopped for good", marks=pytest.mark.long)])
def test_trainers_finish_and_mpiexec_ends_when_the_gateway_is_stopped(
        tmp_path: Path, again: bool) -> None:
    """`mpiexec` kills all ranks when one exits without finalising MPI, so the first trainer that
    finishes must not end the others."""
    if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
        pytest.skip("mpi4py or mpiexec is not installed")
    note = str(tmp_path / "note")
    with LocalCluster(cpus=2, home=tmp_path / "home") as c:
        environ = {**os.environ, "TANGRAM_ACCESS": str(c.access), "TANGRAM_GATEWAY": "1"}
        world = subprocess.Popen(
            [str(MPIEXEC), "-n", "2", sys.executable, "-c", TRAINER, note,
             ":", "-n", "1", sys.executable, "-m", "tangram_hpc", "gateway"],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        gateway = pid_of_the_gateway(note)
        os.kill(gateway, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 60
            # a rank that the gateway serves again in time would stay with MPI for ever
            signs = [Path(f"{note}.{sign}") for sign in ("0.over", "1.socket")]
            while again and not all(sign.exists() for sign in signs):
                assert world.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            if again:
                os.kill(gateway, signal.SIGCONT)
            said, _ = world.communicate(timeout=100)
        finally:
            world.kill()
            if Path(f"/proc/{gateway}").exists():
                os.kill(gateway, signal.SIGKILL)
    lines = sorted(line for line in said.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {r} is done, by socket" for r in (0, 1)]
    if again:  # else mpiexec has to kill the gateway, and may say so by its status
        assert world.returncode == 0


def test_the_gateway_gives_up_a_rank_that_does_not_answer() -> None:
    """The rank took the stopped gateway for dead and left without a message."""
    rig = Rig()
    for rank in (0, 1):
        rig.hear(rank, relay.OPEN, b"\1\0\0\0")
    rig.ns += 8 * 10**9  # stopped; meanwhile the broker heard of rank 0 over its socket
    rig.pipes.come = [(0, b"", "the broker closed the connection")]
    rig.gateway.turn()
    rig.hear(1, relay.LEAVE)
    rig.later(relay.RANK_SILENCE_S + 2)
    assert rig.gateway._over()


def test_a_rank_without_a_client_is_waited_for_while_it_says_that_it_lives() -> None:
    rig = Rig((0,))
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.hear(0, relay.CLOSE)  # its program computes on
    for _ in range(60):
        rig.later(1)
        rig.hear(0, relay.BEAT)
    assert not rig.gateway._over()
    assert rig.to(0).count(relay.BEAT) >= 60  # and the rank hears the gateway
    rig.hear(0, relay.LEAVE)
    assert rig.gateway._over()


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_was_killed_while_it_had_no_client_is_given_up(shared: bool) -> None:
    """But where the launcher ends all ranks together, a silent rank is not dead."""
    rig = Rig((0, 1), shared)
    for rank in (0, 1):
        rig.hear(rank, relay.BEAT)  # as after the meeting
    rig.hear(1, relay.OPEN, b"\1\0\0\0")
    rig.hear(1, relay.CLOSE)
    rig.hear(1, relay.LEAVE)
    for _ in range(round(relay.RANK_SILENCE_S) + 2):
        rig.later(1)
        rig.hear(1, relay.BEAT)
    assert rig.gateway._over() is not shared


@pytest.mark.parametrize("shared", [False, True])
def test_nobody_finalises_mpi_after_a_gateway_was_stopped_for_long(shared: bool) -> None:
    """A rank may have given it up and exited. Where the launcher ends all ranks together, each rank
    waits longer than a gateway stays stopped."""
    rig = Rig((0,), shared)
    rig.hear(0, relay.OPEN, b"\1\0\0\0")
    rig.ns += int((relay.GATEWAY_SILENCE_S - 1) * 1e9)
    rig.gateway.turn()
    rig.hear(0, relay.LEAVE)
    assert rig.gateway.run() is shared
    assert rig.to(0)[-1] == (relay.PART if shared else relay.END)


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_that_leave_while_their_broker_is_away_have_lost_nothing(stopped: bool) -> None:
    """Also in a job that Slurm had suspended before; it ended with status 1 then."""
    rig = Rig((0, 1), False)
    for rank in (0, 1):
        rig.hear(rank, relay.OPEN, b"\1\0\0\0")
    rig.ns += int((relay.GATEWAY_SILENCE_S - 1) * 1e9) * stopped
    rig.pipes.come = [(KEEP_ALIVE, b"", "the broker closed the connection")] * 2
    rig.gateway.turn()
    rig.hear(0, relay.LEAVE)
    assert rig.gateway.orphaned and rig.gateway.abandoned == rig.gateway.orphaned
    rig.hear(1, relay.LEAVE)
    assert rig.gateway.run() is not stopped
    assert rig.gateway.orphaned and not rig.gateway.abandoned


def test_a_gateway_without_a_broker_ends_no_rank_that_works_on() -> None:
    """`mpiexec` would kill the ranks with it, as one that saves its state for some minutes."""
    rig = Rig((0,), True)
    rig.pipes.come = [(KEEP_ALIVE, b"", "the broker closed the connection")]
    rig.gateway.turn()
    rig.later(500)
    assert rig.gateway.orphaned and not rig.gateway._over()
    rig.hear(0, relay.LEAVE)
    assert rig.gateway._over()


class Line(Ranks):
    """A rank's messages with a gateway that beats while it `lives`."""

    lives = True

    def take(self) -> tuple[int, int, bytearray] | None:
        if self.lives and self.said and not self.come:
            self.said.pop()
            return 2, relay.BEAT, bytearray()
        return super().take()


def test_a_rank_without_a_client_says_that_it_lives_and_notices_a_dead_gateway(
        monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BEAT_S", 0.02), ("DOUBT_S", 0.5), ("GATEWAY_SILENCE_S", 1.0)):
        monkeypatch.setattr(relay, name, value)
    line, lost = Line(), list[str]()
    presence = Presence(line, 2, lambda: True, lost.append)
    presence.start()
    time.sleep(1.5)
    assert not lost and presence.hears()
    line.lives = False
    presence._thread.join(30)
    assert lost and "silent" in lost[0]
    assert not presence.hears()
    said = len(line.said)
    presence.stop()
    assert len(line.said) == said


def test_a_rank_that_did_not_run_asks_again_whether_its_gateway_lives(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a library holds the GIL until the program ends. Beats that came before prove nothing.
    """
    monkeypatch.setattr(relay, "GATEWAY_SILENCE_S", 0.3)
    line, lost = Line(), list[str]()
    line.lives = False
    presence = Presence(line, 2, lambda: True, lost.append)
    presence._last_sign -= 60
    assert not presence.hears() and not line.said
    presence._last_sign -= 60
    line.come.append((2, relay.BEAT, bytearray()))
    assert not presence.hears()
    line.lives = True
    line.said.append((2, relay.BEAT, b""))
    presence._last_sign -= 60
    line.come.append((2, relay.BEAT, bytearray()))
    threading.Timer(0.1, lambda: line.said.append((2, relay.BEAT, b""))).start()
    assert presence.hears()


def watched(then: str) -> subprocess.Popen[str]:
    text = ("import os, time\n"
            "from tangram_hpc.transport.mpi.mpi_watchdog import continue_if_stopped\n"
            "from tangram_hpc.gateway.watchdog import watch\n"
            "turns = iter(range(10**9))\n"
            "watch(lambda: next(turns), 4.0, continue_if_stopped(os.getpid(), 3.0, True))\n"
            "time.sleep(5)\n"  # it runs: nobody ends it
            "print('alive', flush=True)\n" + then)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "alive\n"
    return process


def test_a_process_that_stays_stopped_is_continued_by_its_watchdog() -> None:
    process = watched("begun = time.monotonic()\n"
                      "while time.monotonic() - begun < 1.5:\n"
                      "    time.sleep(0.1)\n")
    process.send_signal(signal.SIGSTOP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and said.count("it was stopped for 3 s") == 1


def test_a_process_that_hangs_in_c_is_ended_by_its_watchdog() -> None:
    """No thread of it runs, as in a call of MPI that holds the GIL."""
    process = watched("import ctypes\nctypes.PyDLL(None).sleep(60)\n")
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and said.count("it hangs since 3 s") == 1


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("again", [
    pytest.param(True, id="stopped for 8 s"), pytest.param(False, id="stopped for good")])
def test_trainers_finish_and_the_job_step_ends_when_the_gateway_is_stopped(
        site: Site, again: bool) -> None:
    """With `srun --kill-on-bad-exit=0`, as in the templates."""
    name = f"gwstop{int(again)}"
    go = site.cluster.home / f"{name}.go"
    job = site.sbatch(name, f"python trainer_faults.py 100 {go.name}", "trainer_faults.py",
                      "trainer_actions.py", ranks=2)
    site.until(lambda: len(list(site.cluster.home.glob(f"faults.{job}.*.pid"))) == 2,
               "both ranks to be in mid-step", 90, lambda: site.output(name, job))
    (gateway,) = site.pids("bin/tangram gateway")
    os.kill(gateway, signal.SIGSTOP)
    try:
        wanted = [f"rank {r}: 100 lines once and in order, by socket" for r in range(2)]
        if again:
            time.sleep(8)  # longer than a rank's patience with its gateway
            os.kill(gateway, signal.SIGCONT)
        site.until(lambda: all(w in site.output(name, job) for w in wanted),
                   "both ranks to finish over the socket", 90, lambda: site.output(name, job))
        go.touch()
        site.finish(name, job)
    finally:
        if Path(f"/proc/{gateway}").exists():
            os.kill(gateway, signal.SIGKILL)
    assert not site.pids("tangram")
