"""`tangram broker --restarts N`: real processes that are killed and told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.cluster_parts import until

import tangram_hpc
from tangram_hpc.app.restarts import BROKEN_STATUS, WINDOW_S, RestartLimit, crashed, how_it_ended
from tangram_hpc.errors import AccessError
from tangram_hpc.resources import process_tree
from tangram_hpc.storage.access import read_access
from tangram_hpc.storage.journal_segments import journals

DEADLINE_S = 60.0
# stands in for the broker: it writes the access file, then ends as the test says by a file
STAND_IN = """
import os, signal, socket, sys, time
from pathlib import Path
from tangram_hpc.storage.access import Access, mark_ended, write_access
folder = Path(sys.argv[1])
def say(word):
    with open(folder / "said", "a") as out:
        out.write(f"{word} {os.getpid()}\\n")
while (folder / "not yet").exists():
    time.sleep(0.02)
# Signals come as soon as the access file is there, and this process says first that it serves. It
# takes one after the other: a handler could be interrupted by that of the next signal.
signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
if not (folder / "never").exists():
    host = socket.gethostname()
    write_access(folder / "access.json", Access("j", (), b"", "", host, os.getpid()))
say("serves")
while True:
    came = signal.sigtimedwait(signals, 0.02)
    if came is not None:
        say(signal.Signals(came.si_signo).name)
        if came.si_signo != signal.SIGUSR1:
            mark_ended(folder / "access.json", "j", "now")
            os._exit(0)
    if (folder / "end").exists():
        status = int((folder / "end").read_text())
        (folder / "end").unlink()
        os._exit(status)
"""
PARENT = """
import sys
from pathlib import Path
from tangram_hpc.app.broker_supervisor import supervise
folder = Path(sys.argv[1])
sys.exit(supervise([sys.executable, "-c", sys.argv[2], str(folder)], folder / "access.json", 2))
"""


@dataclass
class Supervised:
    """A supervisor that allows two restarts, and stand-ins for its brokers."""

    folder: Path
    process: subprocess.Popen[str]

    def said(self) -> list[tuple[str, int]]:
        """What the stand-ins said, each with its pid."""
        path = self.folder / "said"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def serving(self, number: int) -> int:
        """Waits for the start of this number, from 1 on; returns its process id."""
        return until(lambda: [pid for word, pid in self.said() if word == "serves"][number - 1:],
                     f"start {number}")[0]

    def ends(self) -> tuple[int, list[str]]:
        """The exit status, and the lines on stderr."""
        err = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, err.splitlines()


@contextmanager
def supervised(folder: Path, *files: str) -> Iterator[Supervised]:
    for name in files:
        (folder / name).touch()
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), STAND_IN], text=True,
                               stderr=subprocess.PIPE)
    it = Supervised(folder, process)
    try:
        yield it
    finally:
        process.kill()
        for _, pid in it.said():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def tell_to_end(folder: Path, status: int) -> None:
    """Lets the stand-in end with this status. It must never read a file that is still empty."""
    (folder / "status").write_text(str(status))
    (folder / "status").rename(folder / "end")


def test_a_broker_that_crashes_is_started_again_until_the_limit(tmp_path: Path) -> None:
    with supervised(tmp_path) as it:
        os.kill(it.serving(1), signal.SIGKILL)
        it.serving(2)
        tell_to_end(tmp_path, BROKEN_STATUS)
        os.kill(it.serving(3), signal.SIGSEGV)
        status, lines = it.ends()
    assert status == 1 and len(lines) == 3, lines
    assert lines[0].startswith("tangram: broker: it was killed by SIGKILL after ")
    assert lines[0].endswith("; it is started again (1 of 2 times within 10 minutes)")
    assert "ended with status 70 after" in lines[1] and "(2 of 2 times" in lines[1]
    assert "killed by SIGSEGV" in lines[2] and "not started again" in lines[2]
    with pytest.raises(AccessError, match="job j has ended"):  # so that nobody waits for another
        read_access(tmp_path / "access.json")


@pytest.mark.parametrize("status", [0, 1, 2, 3])
def test_a_broker_that_ends_by_itself_is_not_started_again(tmp_path: Path, status: int) -> None:
    with supervised(tmp_path) as it:
        it.serving(1)
        tell_to_end(tmp_path, status)
        assert it.ends() == (status, [])


def test_a_broker_that_crashes_before_it_has_served_is_not_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path, "never") as it:
        os.kill(it.serving(1), signal.SIGKILL)
        assert it.ends() == (128 + signal.SIGKILL, [])


def test_a_broker_whose_job_has_ended_is_not_started_again(tmp_path: Path) -> None:
    """It crashed after it had marked the access file as ended."""
    with supervised(tmp_path) as it:
        os.kill(it.serving(1), signal.SIGKILL)
        second = it.serving(2)
        (tmp_path / "access.json").write_text("{}")
        os.kill(second, signal.SIGKILL)
        status, lines = it.ends()
    assert (status, len(lines)) == (128 + signal.SIGKILL, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_end_a_broker_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path) as it:
        first = it.serving(1)
        it.process.send_signal(signal.SIGUSR1)
        until(lambda: ("SIGUSR1", first) in it.said(), "SIGUSR1")
        it.process.send_signal(number)
        assert it.ends() == (0, [])
        assert it.said()[1:] == [("SIGUSR1", first), (number.name, first)]


def test_a_broker_that_is_killed_after_it_was_told_to_end_is_not_started_again(tmp_path: Path
                                                                              ) -> None:
    with supervised(tmp_path) as it:
        first = it.serving(1)
        os.kill(first, signal.SIGSTOP)
        # a process that has yet to stop handles a pending SIGTERM first, as its number is smaller
        until(lambda: "State:\tT" in Path(f"/proc/{first}/status").read_text(), "it is stopped")
        it.process.send_signal(signal.SIGTERM)
        until(lambda: has_pending(first, signal.SIGTERM), "SIGTERM is on its way")
        os.kill(first, signal.SIGKILL)
        assert it.ends() == (128 + signal.SIGKILL, [])


def test_signals_wait_for_a_broker_that_is_being_started_again(tmp_path: Path) -> None:
    """And a broker that was drained before it crashed is drained again."""
    with supervised(tmp_path) as it:
        first = it.serving(1)
        it.process.send_signal(signal.SIGUSR1)
        until(lambda: ("SIGUSR1", first) in it.said(), "SIGUSR1")
        (tmp_path / "not yet").touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: child_of(it.process.pid) not in (0, first), "the second start")
        it.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # a signal that did not wait would kill it now
        (tmp_path / "not yet").unlink()
        second = it.serving(2)
        assert it.ends()[0] == 0
        assert [word for word, pid in it.said() if pid == second] == [
            "serves", "SIGUSR1", "SIGTERM"]


def test_a_first_start_can_be_broken_off(tmp_path: Path) -> None:
    with supervised(tmp_path, "not yet") as it:
        until(lambda: child_of(it.process.pid), "the start")
        it.process.send_signal(signal.SIGTERM)
        status, lines = it.ends()
    assert (status, lines) == (128 + signal.SIGTERM, [])


def test_a_broker_ends_in_order_when_its_parent_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path) as it:
        first = it.serving(1)
        it.process.kill()
        until(lambda: ("SIGTERM", first) in it.said(), "SIGTERM")


def has_pending(pid: int, number: int) -> bool:
    """Whether a signal waits until a stopped process goes on."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def child_of(pid: int) -> int:
    """The child of a supervisor that has begun its own program; 0 while there is none."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in found:
        if STAND_IN[:20].encode() in (process_tree.read(f"/proc/{child}/cmdline") or b""):
            return int(child)
    return 0


# ---- the command -------------------------------------------------------------------------------


@contextmanager
def command(home: Path, *words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`tangram broker` of job `j` with two restarts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tangram_hpc", "broker", "--job", "j", "--restarts", "2", *words],
        text=True, stderr=subprocess.PIPE,
        env={**os.environ, "TANGRAM_HOME": str(home), "TANGRAM_BIND": "none", **environ})
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def broker_pid(home: Path, other: int = 0) -> int:
    """The process id of the broker that serves, once it is not `other`."""
    def found() -> int:
        try:
            pid = read_access(home / "jobs" / "j" / "access.json").pid
        except AccessError:
            return 0
        return pid if pid != other else 0
    return int(until(found, "a broker serves"))


def test_the_command_starts_its_broker_again(tmp_path: Path) -> None:
    access = tmp_path / "jobs" / "j" / "access.json"
    with command(tmp_path, "--placer", "fcfs:1") as parent:
        first = broker_pid(tmp_path)
        assert first != parent.pid
        os.kill(first, signal.SIGKILL)
        second = broker_pid(tmp_path, first)
        with tangram_hpc.connect(access) as client:
            assert client.ask("info")["placer"] == "fcfs:1"
        parent.terminate()
        err = parent.communicate(timeout=DEADLINE_S)[1]
    assert parent.returncode == 0 and err.count("\n") == 1 and "killed by SIGKILL" in err, err
    assert second != parent.pid and not Path(f"/proc/{second}").exists()
    with pytest.raises(AccessError, match="has ended"):
        read_access(access)
    assert len(journals(access.parent)) == 2


def test_refused_settings_are_one_line_as_without_a_parent(tmp_path: Path) -> None:
    with command(tmp_path, TANGRAM_GRACE_S="soon") as parent:
        err = parent.communicate(timeout=DEADLINE_S)[1]
    assert parent.returncode == 2 and err.startswith("tangram: error: ") and err.count("\n") == 1
    with command(tmp_path, "--restarts", "-1") as parent:
        err = parent.communicate(timeout=DEADLINE_S)[1]
    assert parent.returncode == 2 and "--restarts -1: must be at least 0" in err
    with command(tmp_path, "--nodes", "-1") as parent:
        err = parent.communicate(timeout=DEADLINE_S)[1]
    assert parent.returncode == 2 and "--nodes -1: must be at least 0" in err


# ---- the rules ---------------------------------------------------------------------------------


def test_restarts_are_counted_within_ten_minutes() -> None:
    limit = RestartLimit(2)
    assert [limit.take(at) for at in (0.0, 10.0, 20.0)] == [1, 2, 0]
    assert limit.take(WINDOW_S + 5) == 2
    assert limit.take(WINDOW_S + 6) == 0
    assert RestartLimit(0).take(0.0) == 0


def test_only_signals_and_broken_invariants_are_crashes() -> None:
    assert [status for status in (-9, -15, 0, 1, 2, BROKEN_STATUS, 137) if crashed(status)] == [
        -9, -15, BROKEN_STATUS]
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-40) == "was killed by signal 40"
    assert how_it_ended(1) == "ended with status 1"
