"""A command that its init cannot end is ended all the same, and its session goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.executor_rig import Rig

from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import StartAttempt
from tangram_hpc.protocol.payload import ExecCall
from tangram_hpc.protocol.process_frames import RunAction, SandboxLimits
from tangram_hpc.sandbox.manager import init_watchdog
from tangram_hpc.sandbox.manager.memory_pressure import LOOK_S
from tangram_hpc.sandbox.manager.node_attempts import NodeAttempt
from tangram_hpc.sandbox.process import command

# It holds a file in such a way that whoever starts it waits for the holder: the program's init.
HOLDER = """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
with open("x", "w") as file:
    file.write("#!/bin/sh\\n")
os.chmod("x", 0o755)
file = os.open("x", os.O_RDWR)
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError:
    os.symlink("no", "told")
else:
    os.symlink("held", "told")
time.sleep(300)
"""
_LEASE_S = Path("/proc/sys/fs/lease-break-time")


@pytest.mark.parametrize("how", ["timeout", "kill", "neither"])
def test_a_command_that_its_init_cannot_end_is_killed_with_the_init(
        how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = float(_LEASE_S.read_text()) if _LEASE_S.exists() else 0.0
    if longest < 30:
        pytest.skip("here the kernel lets nobody wait for long for the holder of a file")
    monkeypatch.setattr(init_watchdog, "ANSWER_S", 0.2)
    rig = Rig(tmp_path)
    rig.open(background="share")
    hold = f"{sys.executable} -c '{HOLDER}' >/dev/null 2>&1 & while [ ! -h told ]; do :; done"
    _, back = rig.shell(f"{hold}; readlink told", session=1, timeout_ns=20_000_000_000)
    if back.stdout != b"held\n":
        pytest.skip("no leases on this file system")
    began, limit_ns = time.monotonic(), 300_000_000 if how == "timeout" else 0
    lease = rig.begin(ExecCall(argv=("./x",)), Kind.EXEC, session=1, timeout_ns=limit_ns)
    rig.until(lambda: ("started", lease) in rig.events)
    if how == "neither":  # nothing says that it should have ended
        time_is_up = time.monotonic() + 2
        rig.until(lambda: time.monotonic() > time_is_up)
        assert lease not in rig.done
    if how != "timeout":
        rig.executor.kill(lease, ActionState.CANCELLED, "enough")
    outcome, _, _ = rig.end(lease)
    assert time.monotonic() - began < longest / 2, "it was the kernel that ended it"
    assert (outcome.state, outcome.reason) == (
        (ActionState.TIMEOUT, "it ran longer than its limit of 0.3 s") if how == "timeout"
        else (ActionState.CANCELLED, "enough")), outcome
    assert rig.shell("echo on; readlink told", session=1)[1].stdout == b"on\nheld\n"
    rig.close()


def test_a_command_within_its_kill_wait_is_left_to_its_init(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was given to end in is not taken from it, and its init stays."""
    monkeypatch.setattr(init_watchdog, "ANSWER_S", 0.0)
    rig = Rig(tmp_path, kill_wait_s=3.0)
    rig.open()
    session = rig.session(1)
    assert session.process is not None
    init = session.process.pid
    slow = "trap 'sleep 0.7; exit 7' TERM; while :; do sleep 0.02; done"
    outcome, _ = rig.shell(slow, session=1, timeout_ns=200_000_000)
    assert (outcome.state, outcome.exit_code) == (ActionState.TIMEOUT, 7), outcome
    assert session.process.pid == init
    rig.close()


def test_the_watchdog_counts_its_looks_and_not_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was suspended for an hour finds all late when it goes on, and its inits too."""
    monkeypatch.setattr(init_watchdog, "ANSWER_S", 4 * LOOK_S)
    ended: list[int] = []

    class ExecutionProcess:
        def kill(self) -> None:
            ended.append(1)

    attempt = NodeAttempt(StartAttempt(1, Action(1, "a", session=1, timeout_ns=5_000_000_000),
                                       (0,)))
    attempt.process = ExecutionProcess()  # type: ignore[assignment]
    attempt.started_ns = time.monotonic_ns() - 3_600_000_000_000
    watch = init_watchdog.InitWatchdog(2.0)
    for _ in range(4):
        watch.look([(attempt, 0)])
    assert not ended
    watch.look([])  # its lease was gone for a moment: another beginning
    for _ in range(4):
        watch.look([(attempt, 0)])
    assert not ended and attempt.stop is None
    watch.look([(attempt, 0)])
    assert ended and attempt.stop == (ActionState.TIMEOUT, "it ran longer than its limit of 5 s")
    attempt.stop, attempt.started_ns = None, time.monotonic_ns() - 6_900_000_000
    for _ in range(20):  # still within what it may take to say goodbye
        watch.look([(attempt, 0)])
    assert len(ended) == 1 and attempt.stop is None


@pytest.mark.parametrize("kind", ["command", "function"])
def test_the_time_of_a_suspension_does_not_count_for_a_time_limit(kind: str, tmp_path: Path
                                                                  ) -> None:
    """As after `scontrol suspend`: the worker, its inits, runners and commands were all stopped."""
    rig, limit_ns, go = Rig(tmp_path), 2_500_000_000, tmp_path / "go"

    def until_told(path: str) -> str:
        import os
        import time
        while not os.path.exists(path):
            time.sleep(0.4)
        return "told"

    rig.function(until_told, str(tmp_path))  # its runner and its module are there
    rig.shell("true")
    if kind == "function":
        lease = rig.begin_function(until_told, str(go), timeout_ns=limit_ns)
    else:
        wait = f"until [ -e {go} ]; do sleep 0.4; done"
        lease = rig.begin(ExecCall(shell=wait), Kind.EXEC, timeout_ns=limit_ns)
    rig.until(lambda: ("started", lease) in rig.events)
    beneath = rig.processes()
    parents = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
               for pid in beneath}
    # the fork server last, as it may come: it continues an init that was stopped alone
    for pid in sorted(beneath, key=lambda pid: parents[pid] == str(os.getpid())):
        if parents[pid] == str(os.getpid()):
            time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # the worker's loop is in this thread
    for pid in beneath:
        os.kill(pid, signal.SIGCONT)
    resumed = time.monotonic()
    rig.until(lambda: time.monotonic() > resumed + 0.7)
    go.touch()
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.COMPLETED, outcome
    rig.close()


def test_a_quiet_command_is_killed_when_the_wait_after_its_sigterm_is_over(tmp_path: Path) -> None:
    """Its init is not woken before, as nothing is to be measured: without a limit of the disk, and
    with more memory than the init's. That time is no suspension, which would move the kill."""
    rig = Rig(tmp_path, disk_mib=0)
    quiet = "import signal, time; signal.signal(15, 1); x = b'1' * (200 << 20); time.sleep(60)"
    lease = rig.begin(ExecCall(argv=(sys.executable, "-c", quiet)), Kind.EXEC)
    quiet_until = time.monotonic() + 4
    rig.until(lambda: time.monotonic() > quiet_until)
    rig.executor.kill(lease, ActionState.CANCELLED, "no longer needed")
    killed = time.monotonic()
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.CANCELLED and outcome.signal == signal.SIGKILL
    assert time.monotonic() < killed + 3, "0.5 s are between the two signals"
    rig.close()


@pytest.mark.parametrize("busy", [True, False], ids=["a long check", "a suspension"])
def test_only_time_in_which_an_init_stood_still_moves_a_time_limit(
        busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(ns=10**9, cpu_ns=10**8)
    monkeypatch.setattr(command, "time", SimpleNamespace(
        monotonic_ns=lambda: now.ns, thread_time_ns=lambda: now.cpu_ns))
    run = RunAction(1, b"", "", 1, 1, 5 * 10**9, False, "end", SandboxLimits())
    one = command.Command(run, ExecCall(shell="true"), 1 << 20, "process")
    one.started_ns, one.act_at = now.ns, now.ns + run.timeout_ns
    one.mark_time()
    limit = one.act_at
    now.ns += 3 * 10**9
    now.cpu_ns += 3 * 10**9 * busy
    one.mark_time()
    assert one.act_at - limit == (0 if busy else 3 * 10**9)
