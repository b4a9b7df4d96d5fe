"""A sandbox's /tmp is its own and writable, also where the worker's Python lies below the node's
/tmp."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.hostile_rig import reason_to_skip

from tangram_hpc.sandbox.isolation.container_runtimes import RUNTIMES, ContainerSpec, tmp_names

SCRIPT = """
import sys
from tangram_hpc import LocalCluster
assert sys.prefix.startswith("/tmp/"), sys.prefix
top = sys.prefix.split("/")[2]
with LocalCluster(cpus=1, warm=1, isolation="bwrap", home=sys.argv[1]) as client:
    with client.session(disk=8) as s:
        def run(line, ok=True):
            done = s.exec(line, timeout=60).result()
            assert done.ok is ok, (line, done)
            return done.text
        assert run("echo x >/tmp/x; cat /tmp/x; echo $TMPDIR").split() == ["x", "/tmp"]
        assert run("ls /tmp").split() == sorted([top, "x"])
        assert run(f"{sys.executable} -c 'print(6 * 7)'") == "42\\n"
        for line in (f"touch {sys.prefix}/evil", f"rm {sys.prefix}/pyvenv.cfg",
                     f"touch /tmp/{top}/e", f"mv /tmp/{top} /tmp/away", f"rmdir /tmp/{top}",
                     f"rm -rf /tmp/{top}", f"chmod 777 {sys.prefix}"):
            run(line, ok=False)
        assert run("head -c 4000000 /dev/zero >/tmp/big; sleep 0.7; echo ok") == "ok\\n"  # of 8 MiB
        assert s.read(f"{sys.prefix}/pyvenv.cfg").result().startswith(b"home")
        with s.fork() as other:
            assert other.exec("cat /tmp/x").result().text == "x\\n"
            assert other.exec(f"{sys.executable} -V").result().ok
    for _ in range(3):  # one sandbox of the pool, emptied after each command
        done = client.submit(f"ls -A /tmp; touch /tmp/left; {sys.executable} -V >&2").result()
        assert (done.ok, done.text) == (True, top + "\\n"), done
"""


def test_a_shown_path_below_tmp_is_read_only_and_hides_no_file(tmp_path: Path) -> None:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tangram-python-") as folder:
        venv = Path(folder, "deep", "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (venv / "large").write_bytes(b"x" * (16 << 20))  # more than the sandbox's disk
        env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
        done = subprocess.run([str(venv / "bin/python"), "-c", SCRIPT, str(tmp_path / "home")],
                              env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (venv / "evil").exists() and (venv / "pyvenv.cfg").exists()


def test_each_name_in_tmp_is_one_mount_point(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e", "e/f"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("pytest's folder is not below /tmp")
    read = ("/usr", *(str(tmp_path / name) for name in ("a/b/c", "a/d", "e", "e/f", "gone")))
    box = ContainerSpec("/scratch", read=read)
    words, top = RUNTIMES["bwrap"].argv(box), "/".join(str(tmp_path).split("/")[:3])
    at = words.index("/tmp")  # what follows is on top of the sandbox's own
    mounts = [word for name in ("e", "a/d", "a/b/c") for word in (
        "--ro-bind", str(tmp_path / name), str(tmp_path / name))]
    assert words[at + 1:at + 14] == ["--tmpfs", top, *mounts, "--remount-ro", top]
    assert tmp_names(box) == {top.removeprefix("/tmp/")}
    assert tmp_names(ContainerSpec("/scratch", image="/image", read=read)) == frozenset()
