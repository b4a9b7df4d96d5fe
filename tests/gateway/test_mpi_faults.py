"""SIGKILL under mpiexec: the whole world dies with one rank, and the broker and its sessions
survive."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tangram_hpc
from tangram_hpc import LocalCluster

pytestmark = pytest.mark.mpi
MPIEXEC = Path(sys.executable).with_name("mpiexec")
TRAINER = """
import os, sys, time, tangram_hpc
client = tangram_hpc.connect()
session = client.session(mem=10)
session.opened.result(60)
session.write("state", "kept").result(60)
client.submit(["sleep", "600"])
open(sys.argv[1] + f".{tangram_hpc.comm.rank}", "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["a trainer rank", "the gateway"])
def test_the_broker_survives_when_an_mpi_world_is_killed(tmp_path: Path, victim: str) -> None:
    if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
        pytest.skip("mpi4py or mpiexec is not installed")
    with LocalCluster(cpus=4, home=tmp_path / "home", grace_s=4) as c:
        environ = {**os.environ, "TANGRAM_ACCESS": str(c.access), "TANGRAM_GATEWAY": "1",
                   "TANGRAM_WORLD_SIZE": "3"}
        note = str(tmp_path / "pid")
        world = subprocess.Popen(
            [str(MPIEXEC), "-n", "2", sys.executable, "-c", TRAINER, note,
             ":", "-n", "1", sys.executable, "-m", "tangram_hpc", "gateway"],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all(
                Path(f"{note}.{r}").exists() and Path(f"{note}.{r}").read_text() for r in (0, 1)):
            time.sleep(0.05)
        pid = Path(f"{note}.0").read_text()
        if victim == "the gateway":
            told = subprocess.run(["pgrep", "-P", str(_parent(pid)), "-f", "tangram_hpc gateway"],
                                  capture_output=True, text=True, check=True)
            pid = told.stdout.split()[0]
        os.kill(int(pid), signal.SIGKILL)
        assert world.wait(60) != 0  # mpiexec takes all ranks down
        assert c.ask("info")["sessions"] == 2  # kept for the grace
        second = tangram_hpc.connect(c.access)  # and a second trainer finishes its own step
        with second, second.session() as s:
            assert s.exec("echo fine").result(60).text == "fine\n"
            assert list(second.map(pow, range(50), [2] * 50)) == [n * n for n in range(50)]
        deadline = time.monotonic() + 60
        while (info := c.ask("info"))["sessions"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (info["sessions"], info["cpus_free"]) == (0, 4)


def _parent(pid: str) -> int:
    """The process manager that started this rank."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
