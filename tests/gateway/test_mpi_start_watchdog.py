"""The watchdog of MPI's start continues processes of its own job step that were stopped, and leaves
no shared memory of a world that never came up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc.slurm.job_environment import step_marks

MARKS = {"SLURM_JOB_ID": f"7{os.getpid()}", "SLURM_STEP_ID": "3"}
RANK = """
import os, sys, time
from tangram_hpc.slurm.job_environment import step_marks
from tangram_hpc.transport.mpi.mpi_watchdog import start_watchdog
with start_watchdog(os.getpid(), 0, 40.0, "none", step_marks(os.environ)):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
print("it came up", flush=True)
"""
MAPPED = """
import mmap, os, sys, time
from tangram_hpc.transport.mpi.mpi_watchdog import start_watchdog
with start_watchdog(os.getpid(), int(sys.argv[2]), float(sys.argv[3]), "none"):
    with open(sys.argv[1], "w+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096)
    time.sleep(float(sys.argv[4]))
    os._exit(9)
"""
GATEWAY = "import sys, time; time.sleep(1); open(sys.argv[1], 'w').close()"


def state(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long
def test_a_rank_that_was_stopped_before_its_program_began_is_continued(tmp_path: Path) -> None:
    """Only one of the same step."""
    up, environ = str(tmp_path / "up"), {**os.environ, **MARKS}
    gateway, other = (subprocess.Popen([sys.executable, "-c", GATEWAY, path], env=env, text=True)
                      for path, env in ((up, environ), (str(tmp_path / "other"),
                                                        {**environ, "SLURM_STEP_ID": "4"})))
    for process in (gateway, other):
        process.send_signal(signal.SIGSTOP)
    try:
        done = subprocess.run([sys.executable, "-c", RANK, up], env=environ, capture_output=True,
                              text=True, timeout=100, check=False)
        assert (done.returncode, done.stdout) == (0, "it came up\n"), done.stderr
        assert state(other) == "T"
    finally:
        for process in (gateway, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("rank", "timeout_s", "ends_s", "status"), [
    (0, 2.0, 60.0, 2), (1, 1.0, 60.0, 2), (0, 30.0, 4.0, 9), (1, 30.0, 4.0, 9)])
def test_a_world_that_never_comes_up_leaves_no_shared_memory(
        rank: int, timeout_s: float, ends_s: float, status: int) -> None:
    """The rank waits too long, or ends by itself. The watchdog outlives a rank that ends."""
    file = Path(f"/dev/shm/mpich_shm_test{os.getpid()}_{rank}")
    arguments = [str(file), str(rank), str(timeout_s), str(ends_s)]
    try:
        done = subprocess.run([sys.executable, "-c", MAPPED, *arguments], capture_output=True,
                              timeout=50, check=False)  # until the watchdog has closed its stderr
        assert done.returncode == status, done.stderr
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_a_step_is_known_by_its_job_and_its_number() -> None:
    assert step_marks(MARKS) == tuple(f"{k}={v}" for k, v in MARKS.items())
    assert step_marks({"SLURM_JOB_ID": "7"}) == () == step_marks({})
