"""A gateway that is stopped at any point of its life, for 2 s, for 8 s or for good, under `mpiexec`
and under `srun`: the step ends with status 0, and every trainer has each of its results once."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.slurm_site import Site
from helpers.stopping_rig import (
    ACTIONS,
    BEFORE_IT_BEGINS,
    TRAINER,
    Stop,
    check,
    stop_gateway,
    stops,
)

from tangram_hpc import LocalCluster

MPIEXEC = Path(sys.executable).with_name("mpiexec")
NUMBERS = itertools.count()
SIDE_BY_SIDE = 3  # worlds at a time: they mostly wait


def under_mpiexec(cluster: LocalCluster, stop: Stop, ranks: int, base: Path) -> str:
    mark = f"m{next(NUMBERS)}"
    folder = base / mark
    folder.mkdir()
    environ = {**os.environ, "TANGRAM_ACCESS": str(cluster.access), "TANGRAM_GATEWAY": "1",
               "STOPS": mark}
    words = [str(MPIEXEC), "-n", str(ranks), sys.executable, str(TRAINER), str(ACTIONS),
             str(folder), ":", "-n", "1", sys.executable, "-m", "tangram_hpc", "gateway"]
    world = subprocess.Popen(words, env=environ, text=True, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return watch_the_end(stop, ranks, folder, mark, world)


def watch_the_end(stop: Stop, ranks: int, folder: Path, mark: str,
                  world: subprocess.Popen[str]) -> str:
    begun = time.monotonic()
    try:
        seen = stop_gateway(stop, folder, ranks, mark, world)
        said, why = world.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        world.kill()
        raise AssertionError(f"{stop} with {ranks} trainers did not end: {seen}") from None
    how = check(stop, folder, ranks, said, world.returncode, why + seen)
    line = (f"{stop.moment:32s} +{stop.delay_s:.3f} s for {stop.for_s or 999:3.0f} s, {ranks} "
            f"trainers: ended after {time.monotonic() - begun:5.1f} s by {how}; {seen}")
    print(line, flush=True)
    return line


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> LocalCluster:
    if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
        pytest.skip("mpi4py or mpiexec is not installed")
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("stops")) as running:
        yield running


@pytest.mark.mpi
@pytest.mark.timeout(150)
def test_a_world_ends_well_whose_gateway_is_stopped_for_two_seconds(
        cluster: LocalCluster, tmp_path: Path) -> None:
    under_mpiexec(cluster, Stop("while all are closed", 0.1, 2.0), 2, tmp_path)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_world_ends_well_wherever_mpiexec_has_its_gateway_stopped(
        cluster: LocalCluster, tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        ends = [pool.submit(under_mpiexec, cluster, stop, 2 + n % 3, tmp_path)
                for n, stop in enumerate(stops(0))]
        failed = [str(error) for end in ends if (error := end.exception()) is not None]
    assert not failed, "\n".join(failed)


# ---- under srun ----------------------------------------------------------------------------------


def job_step(site: Site, job: str, ranks: int) -> tuple[subprocess.Popen[str], Path, str]:
    """One more world on the nodes of a job's trainers, started as the templates start theirs."""
    mark = f"s{next(NUMBERS)}"
    folder = site.cluster.home / mark
    site.cluster.run_as_user(["mkdir", str(folder)], check=True)
    script = (f"source {site.venv}/bin/activate; [ $SLURM_PROCID -lt {ranks} ] || "
              f"exec tangram gateway; exec python {TRAINER.name} {ACTIONS} {folder}")
    told = site.cluster.as_user()
    told["env"] = {**told["env"], "TANGRAM_JOB": job, "TANGRAM_GATEWAY": "1", "STOPS": mark,
                   "TANGRAM_WORLD_SIZE": str(ranks + 1)}
    return subprocess.Popen(
        ["srun", f"--jobid={job}", "--het-group=2", f"--ntasks={ranks + 1}", "--overlap",
         "--mpi=pmi2", "--kill-on-bad-exit=0", "bash", "-c", script], text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        **told), folder, mark


def under_srun(site: Site, job: str, stop: Stop, ranks: int) -> str:
    world, folder, mark = job_step(site, job, ranks)
    return watch_the_end(stop, ranks, folder, mark, world)


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_job_step_ends_well_wherever_its_gateway_is_stopped(site: Site) -> None:
    shutil.copy(TRAINER, site.cluster.home)
    with site.held("stops", ranks=4, time="60") as job, \
            concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        ends = [pool.submit(under_srun, site, job, stop, 2 + n % 3)
                for n, stop in enumerate([Stop(BEFORE_IT_BEGINS, 0.0, 0.0), *stops(1)])]
        failed = [str(error) for end in ends if (error := end.exception()) is not None]
    assert not failed, "\n".join(failed)


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("note", ["closed", "connected", "leaving"])
def test_a_job_step_ends_when_a_rank_is_killed_at_any_point(site: Site, note: str) -> None:
    """A rank without a client tells nobody that it ends; the gateway hears nothing of it any more.
    The other rank is done with all of its results."""
    shutil.copy(TRAINER, site.cluster.home)
    with site.held(f"kill{note}", ranks=2) as job:
        world, folder, _ = job_step(site, job, 2)
        site.until(lambda: list(folder.glob(f"{note}.*")), f"a rank to note {note}", 90)
        victim = next(folder.glob(f"{note}.*")).name.partition(".")[2]
        os.kill(int(victim), signal.SIGKILL)
        said, why = world.communicate(timeout=120)
    assert world.returncode == 128 + signal.SIGKILL, (said, why)
    whole = [line for line in said.splitlines() if f"{ACTIONS} of {ACTIONS} right, by mpi" in line]
    assert len(whole) == 1 + (note == "leaving"), (said, why)
