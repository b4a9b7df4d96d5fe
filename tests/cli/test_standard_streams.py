"""A verb whose stdout is full, and one that was started without some of its standard streams."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc import cli
from tangram_hpc.app.loop import no_more_processes


def config(redirected: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs `tangram config` with redirections of a shell."""
    return subprocess.run(["sh", "-c", f'"$0" -m tangram_hpc config {redirected}', sys.executable],
                          env=os.environ | more, text=True, capture_output=True, timeout=60,
                          check=False)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_told_in_one_line(unbuffered: str) -> None:
    told = config(">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert told.returncode == 1
    assert told.stderr == ("tangram: error: a write failed: No space left on device; what went to "
                           "stdout or to a file is not complete\n")


@pytest.mark.parametrize(("encoding", "printed"), [
    ("ascii", "\\xfc\\u7b97"), ("latin-1", "ü\\u7b97"), ("utf-8", "ü算")])
def test_characters_that_a_locale_lacks_are_escaped(encoding: str, printed: str,
                                                    tmp_path: Path) -> None:
    (tmp_path / "ü算").write_text("")
    told = subprocess.run(
        [sys.executable, "-m", "tangram_hpc", "--config", str(tmp_path / "ü算"), "config"],
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}, capture_output=True,
        timeout=60, check=False)
    assert (told.returncode, told.stderr) == (0, b"")
    assert f"/{printed};".encode(encoding) in told.stdout


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_verb_needs_no_standard_streams(closed: str) -> None:
    told = config(closed)
    assert (told.returncode, told.stderr) == (0, "")
    assert bool(told.stdout) is (closed == "<&-")


def test_an_error_does_not_go_to_stdout_for_want_of_stderr() -> None:
    told = config("--config /none 2>&-")
    assert (told.returncode, told.stdout) == (2, "")


def test_an_interrupt_while_a_verb_is_imported_ends_the_command_in_silence(
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str, package: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["acct"]) == 128 + signal.SIGINT
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("error", "what"), [
    (RuntimeError("can't start new thread"), "thread"),
    (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "process")])
def test_a_limit_of_processes_is_named_with_its_remedy(
        error: Exception, what: str, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str]) -> None:
    """As Python raises them where `ulimit -u`, which Slurm hands on to the job, is used up, or the
    limit of a cgroup."""
    def refused(name: str, package: str) -> None:
        raise error

    monkeypatch.setattr(cli.importlib, "import_module", refused)
    assert cli.main(["acct"]) == 1
    told = capfd.readouterr().err
    assert f"no {what} can be started" in told and told.count("\n") == 1
    assert "`ulimit -u`" in told and "`pids.max`" in told
    assert no_more_processes(RuntimeError("dictionary changed size")) == ""
    assert no_more_processes(BlockingIOError(errno.EAGAIN, "write", 17)) == ""  # a full pipe
