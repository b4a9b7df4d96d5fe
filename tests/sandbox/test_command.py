"""What an init keeps from one command to the next is no command's to change: environments by grant,
and the signals that a program expects. Names that the worker's locale has not are refused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc.sandbox.environment import Grants, sandbox_environment

_LIBRARY = 3 << 31  # the C library's own signals 32 and 33, which its spawn ignores

# what it inherits itself, then what a command of it inherits
_SPAWN = """
import os, sys
from tangram_hpc.sandbox.process.command import RESTORED
from tangram_hpc.sandbox.process.spawn import spawn
def without_setsid(*args, **options): raise NotImplementedError
if sys.argv[1:]:
    os.posix_spawn = without_setsid
ignored = [l for l in open('/proc/self/status') if l.startswith('SigIgn')]
print(ignored[0].split()[1], flush=True)
os.waitpid(spawn(None, '/bin/grep', ['grep', 'SigIgn', '/proc/self/status'], {},
                 {0: 0, 1: 1, 2: 2}, '', RESTORED), 0)
"""


@pytest.mark.parametrize("words", [[], ["without setsid"]])
def test_a_command_receives_signals_that_the_workers_parent_ignores(words: list[str]) -> None:
    told = subprocess.run(["/bin/sh", "-c", "trap '' HUP INT USR1; exec \"$0\" -c \"$@\"",
                           sys.executable, _SPAWN, *words], capture_output=True, text=True,
                          timeout=60, check=True).stdout.split()
    ours, its = int(told[0], 16), int(told[2], 16)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ):
        assert ours >> number - 1 & 1, number
    assert its & ~_LIBRARY == 0


def test_a_grants_environment_is_built_once_and_a_commands_variables_stay_its_own() -> None:
    grants = Grants(sandbox_environment({"PATH": "/bin", "SLURM_JOB_ID": "7"}, "/h", "/t"), "/cpus")
    plain = grants.plain(1, 2, "")
    assert plain is grants.plain(1, 2, "") and plain is not grants.plain(2, 2, "")
    before = dict(plain)
    assert before == {"PATH": "/bin", "LANG": "C.UTF-8", "SHELL": "/bin/sh", "HOME": "/h",
                      "TMPDIR": "/t", "TANGRAM_CPUS": "1", "TANGRAM_CPUS_MAX": "2",
                      "OMP_NUM_THREADS": "2", "MAKEFLAGS": "-j2",
                      "PYTEST_XDIST_AUTO_NUM_WORKERS": "2", "TANGRAM_CPUS_FILE": "/cpus",
                      "CUDA_VISIBLE_DEVICES": ""}
    own = {"MINE": "1", "MAKEFLAGS": "-k", "TANGRAM_CPUS": "64", "CUDA_VISIBLE_DEVICES": "0"}
    assert grants.adding(own, 1, 2, "") == {**before, "MINE": "1", "MAKEFLAGS": "-k"}
    assert grants.only({"A": "b", "TANGRAM_CPUS_FILE": "/etc"}, 3, 3, "1,2") == {
        "A": "b", "TANGRAM_CPUS": "3", "TANGRAM_CPUS_MAX": "3", "TANGRAM_CPUS_FILE": "/cpus",
        "CUDA_VISIBLE_DEVICES": "1,2"}
    assert grants.plain(1, 2, "") == before
    for units in range(1, 1000):  # a session that lives long and is resized often
        assert grants.plain(units, units, "")["TANGRAM_CPUS"] == str(units)
    assert len(grants._made) < 100


# what a client hears of a name that the locale has not, from a command and of a file
_BEYOND = """
import sys
from tangram_hpc.protocol.payload import FileCall
from tangram_hpc.sandbox.files import confine, file_answers
from tangram_hpc.sandbox.process import command
from tangram_hpc.sandbox.process.unstartable import Unstartable
beyond = chr(20013)
for start in (
        lambda: command._start('/bin/echo', ['echo', beyond], {}, (0, 1, 2), '', None),
        lambda: command.find_program(beyond, {}),
        lambda: command.find_program('ls', {'PATH': '/' + beyond}),
        lambda: command.find_program('ls', {'PATH': 'bin'}, beyond),
        lambda: command.start_in(beyond, '/', '/bin/true', ['true'], {}, (0, 1, 2))):
    try:
        start()
    except Unstartable as error:
        print(ascii(str(error)))
try:
    confine.write(sys.argv[1], beyond, b'of a command', 0o644)
except confine.PathRefused as error:
    print(error.code, ascii(str(error)))
for data in (None, b'new'):
    try:
        file_answers.answer(sys.argv[1], FileCall(beyond, data))
    except confine.PathRefused as error:
        print(error.code, ascii(str(error)))
"""


def test_what_the_workers_locale_has_not_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """A file, a program or a folder in PATH of such a name ended the sandbox's init."""
    told = subprocess.run(
        [sys.executable, "-c", _BEYOND, str(tmp_path)], text=True, capture_output=True, timeout=60,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        check=False)
    lines = told.stdout.splitlines()
    assert len(lines) == 8, told.stderr
    assert all("encoding is ascii" in line and "LC_ALL=C.UTF-8" in line for line in lines)
    assert [line.split()[0] for line in lines[5:]] == ["EILSEQ"] * 3
