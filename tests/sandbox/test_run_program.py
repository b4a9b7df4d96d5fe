"""What the fork server imports, and how its processes run programs of the node."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tangram_hpc.sandbox.run_program import run_program


def test_the_fork_server_does_not_import_what_makes_forks_slow() -> None:
    """With `threading`, every fork of it began 0.5 to 0.8 ms later. With `random`, every child drew
    new random numbers."""
    told = subprocess.run(
        [sys.executable, "-c", "import sys, tangram_hpc.sandbox.process.fork_server\n"
                               "print(*sys.modules)"], capture_output=True, text=True, check=True)
    slow = {"threading", "random", "subprocess", "logging"}
    if sys.version_info < (3, 11):  # msgspec imports `uuid`, and that `platform`, which needs them
        slow -= {"threading", "subprocess"}
    if sys.version_info >= (3, 14):  # ctypes imports `sysconfig`, and that needs it
        slow -= {"threading"}
    assert not slow & set(told.stdout.split())


def test_a_program_gets_the_descriptors_it_is_to_have_and_no_input() -> None:
    ends = os.pipe()
    os.write(ends[1], b"word")
    script = f"cat; head -c 4 /proc/self/fd/{ends[0]}; pwd; echo wrong >&2; exit 3"
    done = run_program(["sh", "-c", script], cwd="/", pass_fds=ends[:1])
    assert (done.returncode, done.stdout, done.stderr) == (3, b"word/\n", b"wrong\n")
    for fd in ends:
        os.close(fd)


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        run_program(["no-such-program"])
