"""A fork of `helpers/forked_start.py` meets what a start of Python would give it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import forked_start
from helpers.forked_start import Script

from tangram_hpc.cli import VERBS

pytestmark = pytest.mark.skipif(forked_start._CLONE is None,
                                reason="no number of clone is known for this machine")
TANGRAM = [sys.executable, "-m", "tangram_hpc"]
STARTED = ("broker", "worker", "gateway", "run", "acct", "books", "serve")  # the others are `long`
TOLD = """
import json, os, subprocess, sys
print(json.dumps([sys.argv, __name__, os.getcwd(), os.environ.get("WORD"), os.getppid(),
                  os.getsid(0) == os.getpid(), os.path.exists("/proc/self/fd/%s" % sys.argv[1]),
                  open("/proc/self/cmdline").read().rstrip("\\0"), subprocess.Popen.__name__]),
      flush=True)
sys.exit(sys.argv[2])
"""


def forks() -> bool:
    """Whether this process has a server whose forks are like its own children."""
    return forked_start._server_for(os.environ) is not None


def test_a_program_gets_its_words_streams_descriptors_and_parent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TOLD)
    handed_on = os.open(program, os.O_RDONLY)
    done = [subprocess.run([sys.executable, path, str(handed_on), "the end"], cwd=tmp_path,
                           env={**os.environ, "WORD": "a word"}, capture_output=True, text=True,
                           pass_fds=[handed_on], start_new_session=True, check=False)
            for path in (Script(program), program)]
    os.close(handed_on)
    forked, started = done
    assert forks() and forked.stdout == started.stdout.replace('"Popen"', '"ForkingPopen"')
    assert f'"{tmp_path}", "a word", {os.getpid()}, true, true' in forked.stdout
    assert (forked.returncode, forked.stderr) == (started.returncode, started.stderr) == (
        1, "the end\n")


def test_the_command_tells_its_status_and_what_is_wrong() -> None:
    assert subprocess.run([*TANGRAM, "--version"], check=False).returncode == 0
    refused = subprocess.run([*TANGRAM, "nothing"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "") and "invalid choice" in refused.stderr


def test_output_that_is_lost_at_the_end_is_told_as_by_a_start(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.stdout = open('/dev/full', 'w')\nprint('lost')\n")
    for path in (Script(program), program):
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        assert done.returncode == 120 and "No space left on device" in done.stderr


@pytest.mark.parametrize("verb", [
    pytest.param(verb.replace("_", "-"), marks=() if verb in STARTED else pytest.mark.long)
    for verb in VERBS])
def test_a_verb_that_is_entered_first_starts_for_real(verb: str) -> None:
    """No fork shows a cycle of imports that depends on what was imported before."""
    with forked_start._START([*TANGRAM, verb, "--help"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "") and out.startswith("usage: tangram")


@pytest.mark.long
@pytest.mark.parametrize("module", forked_start.IMPORTED)
def test_what_the_server_has_imported_can_each_be_imported_first(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True,
                          text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_ends_it_and_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        child = subprocess.Popen([sys.executable, Script(program)], stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL)
        assert child.stdout is not None and child.stdout.readline() == b"here\n"
        child.send_signal(number)
        child.communicate()
        assert child.returncode == -number


@pytest.mark.parametrize("environ", [{"PYTHONOPTIMIZE": "1"}, {"LC_ALL": "C"}])
def test_what_a_fork_could_not_take_up_starts_for_real(environ: dict[str, str]) -> None:
    assert forks() and forked_start._server_for({**os.environ, **environ}) is None


def test_a_process_with_another_umask_starts_for_real() -> None:
    before = os.umask(0o077)
    try:
        assert not forks()
    finally:
        os.umask(before)
    assert forks()
