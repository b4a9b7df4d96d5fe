"""Real sandboxes of bwrap, where it is installed: what is inside, what is not, and their end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tangram_hpc.sandbox.files import scratch
from tangram_hpc.sandbox.isolation import container_runtimes
from tangram_hpc.sandbox.manager import probe

READ = ["/usr", "/bin", "/lib", "/lib64", "/sbin"]
BWRAP = container_runtimes.RUNTIMES["bwrap"]
pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")

HOST = """
import os, sys
from tangram_hpc.sandbox.process import bootstrap; from tangram_hpc.sandbox.isolation import join
from tangram_hpc.sandbox.isolation.pause_process import PauseProcess
from tangram_hpc.sandbox.isolation.container_runtimes import RUNTIMES, ContainerSpec
bootstrap.guard("execution", 9)
box = ContainerSpec(sys.argv[1], read=sys.argv[3:])
runtime = RUNTIMES["bwrap"]
pause = PauseProcess(runtime.argv(box), runtime.env(os.environ), 20)
join.enter(pause.inside, "/session")
pid = os.posix_spawn("/bin/sh", ["sh", "-c", sys.argv[2]], {"PATH": "/usr/bin:/bin"})
os.waitpid(pid, 0)
print("execution process lives", join.capabilities(), pause.inside, flush=True)
sys.stdin.read()
"""

UNBUILT = """
import os, sys
from tangram_hpc.protocol.process_frames import SandboxSpec, Setup
from tangram_hpc.sandbox.process import bootstrap, isolation_setup
from tangram_hpc.sandbox.process.units_file import UnitsFile
bootstrap.guard("execution", 9)
os.dup2(0, bootstrap.MODES)
UnitsFile(sys.argv[1])
box = SandboxSpec("bwrap", True, ("example.org",), sys.argv[2], workdir="/etc/file")
try:
    isolation_setup.build(Setup(0, 0, box, tuple(sys.argv[3:])), sys.argv[1])
except isolation_setup.Unbuildable as error:
    print(error.infeasible, error, flush=True)
try:
    while os.waitpid(-1, 0):  # for ever, if one was not killed
        pass
except ChildProcessError:
    print("nothing is left", flush=True)
"""

ORPHAN = """
import os, subprocess, sys
from tangram_hpc.sandbox.isolation.container_runtimes import RUNTIMES
from tangram_hpc.sandbox.manager import probe
def start(argv, **how):  # the probe begins when a line comes, after this process has ended
    subprocess.Popen(["sh", "-c", 'read line; exec "$@"', "sh", *argv])
    os._exit(0)
probe.subprocess.run = start
probe.examine(RUNTIMES["bwrap"], "", sys.argv[2:], 10, sys.argv[1])
"""


def start(home: Path, script: str) -> subprocess.Popen[str]:
    place = str(home / "place")
    scratch.make(place)
    return subprocess.Popen([sys.executable, "-c", HOST, place, script, *READ], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run(home: Path, script: str) -> str:
    process = start(home, script)
    out, _ = process.communicate(timeout=60)
    assert "execution process lives 0" in out
    return out


def test_a_sandbox_that_fails_after_its_isolation_leaves_no_process(tmp_path: Path) -> None:
    """From within it does not see its children in /proc, and must know them."""
    place, image = str(tmp_path / "place"), tmp_path / "image"
    scratch.make(place)
    (image / "etc").mkdir(parents=True)
    (image / "etc/file").touch()
    done = subprocess.run([sys.executable, "-c", UNBUILT, place, str(image), *READ], text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=30)
    assert done.stdout == ("True image: its working directory '/etc/file' cannot be entered "
                           "(Not a directory); correct WORKDIR of the image\nnothing is left\n")


def test_a_bwrap_sandbox_shows_only_the_listed_folders(tmp_path: Path) -> None:
    out = run(tmp_path, "echo $(ls /); pwd; hostname;"
                        "touch /x /dev/x /usr/x 2>/dev/null || echo ro;"
                        "echo hi >mine; echo shm >/dev/shm/f && cat /dev/shm/f;"
                        "readlink /proc/1/fd/0 || echo shielded")
    lines = out.splitlines()
    assert set(lines[0].split()) == {"bin", "dev", "home", "lib", "lib64", "proc", "sbin",
                                     "session", "tmp", "usr"}
    assert lines[1:6] == ["/session", "sandbox", "ro", "shm", "shielded"]
    assert (tmp_path / "place/home/mine").stat().st_uid == os.geteuid()
    assert not os.path.exists("/dev/shm/f")


def test_kill_of_all_processes_inside_spares_the_sandbox_process_and_the_namespace_anchor(
        tmp_path: Path) -> None:
    run(tmp_path, "sleep 100 & kill -9 -1")


def test_no_process_is_left_when_the_sandbox_process_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "setsid sleep 1000 >/dev/null 2>&1 & echo started")
    assert process.stdout
    inside = 0
    for line in process.stdout:
        if line.startswith("execution process lives"):
            inside = int(line.split()[-1])
            break
    assert os.path.exists(f"/proc/{inside}")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{inside}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{inside}")


def test_a_failed_probe_says_why() -> None:
    assert probe.probe(BWRAP, "", READ, 10) == ""
    assert "bwrap: " in probe.probe(BWRAP, "", ["/usr"][:0], 10)


def test_a_probe_without_an_end_is_late_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that starts too much at once: the runtime may work all the same."""
    monkeypatch.setattr(probe, "module_command", lambda *_words: ["sleep", "60"])
    found = probe.examine(BWRAP, "", READ, 0.05)
    assert (found.late, found.why_not) == (True, "bwrap was not tried to the end in 0.2 s")


def test_what_others_write_to_stderr_does_not_spoil_the_probe(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/no/such/library.so")  # the loader warns at each start
    assert probe.probe(BWRAP, "", READ, 10) == ""


def test_a_probe_whose_worker_was_killed_before_it_began_makes_no_folder(tmp_path: Path) -> None:
    """Neither in the worker's folder nor, when that was removed, among temporary files."""
    worker, temporary = tmp_path / "worker", tmp_path / "temporary"
    temporary.mkdir()
    before = temporary.stat().st_mtime_ns
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(worker), *READ], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env=os.environ | {"TMPDIR": str(temporary)}) as process:
        assert process.wait(60) == 0
        assert process.communicate("\n", timeout=60)[0] == "", "it ends without a word"
    assert temporary.stat().st_mtime_ns == before
