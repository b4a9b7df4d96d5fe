"""Another processor: the package is built for aarch64 and run by QEMU's user mode emulation.

QEMU offers neither namespaces nor filters of system calls, so sessions with isolation are refused
there. Each test takes some minutes.
"""

from __future__ import annotations

import platform
import re

import pytest
from helpers import other_system

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.skipif(
    platform.machine() == "aarch64", reason="all tests run on aarch64 here")]

BUILD = """
export PYTHONPATH=/opt/tangram
python3 -W ignore setup.py -q build_ext --inplace
"""
LIVE = BUILD + """
cat >/tmp/live.py <<'EOF'
import platform
from tangram_hpc import LocalCluster
from tangram_hpc.errors import InfeasibleRequest

with LocalCluster(cpus=2) as cluster:
    print("FUNCTION", cluster.submit(platform.machine).result(600))
    print("NUMBERS", [future.result(600) for future in [cluster.submit(pow, 2, n) for n in (3, 9)]])
    with cluster.session(trusted=True) as session:
        done = session.exec("uname -m; echo kept >file; exit 3").result(600)
        print("COMMAND", done.stdout, done.exit_code, session.read("file").result(600))
    try:
        with cluster.session():
            print("NOT REFUSED")
    except InfeasibleRequest as refused:
        print("REFUSED", refused)
EOF
python3 /tmp/live.py
"""
# None of them starts a broker, which takes a quarter of a minute under emulation, opens a session
# with isolation, or expects that a command ends within milliseconds.
FAST_PATH = "tests/sandbox/test_fast_path.py::test_"
TESTS = ("tests/test_golden.py::test_frozen_is_equal", "tests/protocol/test_wire.py",
         "tests/storage/test_journal.py", "tests/storage/test_checkpoint.py",
         "tests/sandbox/test_seccomp.py",
         *(FAST_PATH + name for name in (
             "the_fast_path_is_built_where_there_is_a_compiler",
             "a_changed_memory_layout_has_a_new_version",
             "a_library_that_was_built_from_other_code_is_not_used")),
         "tests/scheduler/test_elastic.py", "tests/scheduler/test_scheduler.py",
         "tests/scheduler/test_cmlfq.py")


def run(script: str) -> str:
    """The output of a script on aarch64; the script must succeed."""
    try:
        done = other_system.run(script, 3000, other_system.ARM64)
    except other_system.Unavailable as why:
        pytest.skip(str(why))
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_actions_and_trusted_sessions_run_and_others_are_refused_in_one_line() -> None:
    said = run(LIVE)
    assert "FUNCTION aarch64\n" in said and "NUMBERS [8, 512]\n" in said
    assert r"COMMAND b'aarch64\n' 3 b'kept\n'" in said
    assert re.search(r"^REFUSED trusted: no node here can keep a sandbox from your own files",
                     said, re.MULTILINE)


def test_decisions_are_those_of_other_processors() -> None:
    """The golden runs, the wire format, the scheduler, and the parts in C."""
    said = run(f"{BUILD}python3 -m pytest -q -rs -p no:cacheprovider -m 'not long and not alone' "
               f"{' '.join(TESTS)}")
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) > 300
