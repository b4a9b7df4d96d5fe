"""The training run with TRL as a het job on a real Slurm: a requeue and a killed node cost no step.
TRL is in a virtual environment of its own (`make trl`)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.devcluster_fixture import devcluster, running_cluster
from helpers.slurm_site import REPO, Site, install_for

pytestmark = [
    pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None,
                       reason="TRL is not installed here; `make trl` runs this")]

STEPS, REQUEUED, KILLED = 24, 6, 14  # all steps, and after how many of them something happens
WORDS = ("--steps", str(STEPS), "--generations", "2", "--seed", "3")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster whose nodes can lose their power, and on which a requeued job starts again soon."""
    name = f"t{os.getpid()}"
    prefix = f"/var/tmp/devcluster-{name}"
    with running_cluster(tmp_path_factory, name=name, prefix=prefix, netns=True, cpu_nodes=3,
                         gpu_nodes=1, trainer_nodes=1, cpus_per_node=8, conf_line=[
                             "SlurmdTimeout=60",
                             f"AuthInfo=socket={prefix}/munge/munge.sock,cred_expire=10",
                         ]) as cluster:
        # TRL and torch are large: the cluster's user borrows those of this environment, by a file
        # in a virtual environment that no other test has (they install other packages)
        venv = install_for(cluster, ("{tree}", "setuptools"))
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
        packages.joinpath("trl.pth").write_text(sysconfig.get_path("purelib") + "\n")
        told = cluster.run_as_user([f"{venv}/bin/python", "-c", "import trl, torch, datasets"])
        if told.returncode:
            pytest.skip(f"{cluster.user} cannot use the TRL of this environment: "
                        f"{told.stderr.strip().splitlines()[-1]}")
        yield Site(cluster, venv)


def reached(site: Site, least: int) -> bool:
    """Whether so many steps are done."""
    try:
        return len(json.loads((site.cluster.home / "kept" / "steps.json").read_text())) >= least
    except FileNotFoundError:
        return False


def undisturbed(folder: Path) -> list[dict[str, Any]]:
    """Returns the steps of the same training without a broker, whose rewards are the reference."""
    out = folder / "inside.json"
    subprocess.run([sys.executable, str(REPO / "bench/trl_run/run.py"), "--mode", "inside", *WORDS,
                    "--out", str(out)], check=True, capture_output=True, timeout=300)
    steps: list[dict[str, Any]] = json.loads(out.read_text())["steps_done"]
    return steps


def test_a_requeue_and_a_killed_node_cost_no_step(site: Site, tmp_path: Path) -> None:
    cluster = site.cluster
    script = site.venv.parent / "tree" / "bench" / "trl_run" / "het_job.sh"
    options = {"requeues": 9, "nodes_cpu": 3, "nodes_gpu": 1, "mem_cpu": 1500, "mem_gpu": 600,
               "mem_trainer": 3000}
    rendered = cluster.run_as_user(
        [str(script), *WORDS, "--checkpoints", "kept"],
        env={"VENV": str(site.venv), "OUTPUT": "trl.sbatch", "TIME": "15", "CPUS_CPU": "4",
             "TEMPLATE_OPTIONS": " ".join(f"-o {k}={v}" for k, v in options.items())})
    assert rendered.returncode == 0, rendered.stderr
    told = cluster.run_as_user(["sbatch", "--parsable", "trl.sbatch"])
    assert told.returncode == 0, told.stderr
    job = told.stdout.strip().split(";")[0]

    def said() -> str:
        return "".join(p.read_text() for p in sorted(cluster.home.glob(f"trl-run-{job}*.out")))

    site.until(lambda: reached(site, REQUEUED), "steps", 300, said)
    assert cluster.run_as_user(["scontrol", "requeue", job]).returncode == 0
    site.until(lambda: reached(site, KILLED), "steps after the requeue", 400, said)
    leader = cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%B"]).stdout.split()[0]
    killed = next(node for node in reversed(cluster.cpu_nodes) if node != leader)
    cut = devcluster("node", "--prefix", str(cluster.prefix), "kill", killed)
    assert cut.returncode == 0, cut.stderr
    site.until(lambda: (cluster.home / "trl-run.json").exists(), "the end of the training", 500,
               said)
    site.finish("trl-run", job, 300)  # Slurm must learn of the killed node first

    run = json.loads((cluster.home / "trl-run.json").read_text())
    rewards = [step["reward"] for step in run["steps_done"]]
    wanted = [step["reward"] for step in undisturbed(tmp_path)]
    print(f"requeued after step {REQUEUED}, {killed} killed after step {KILLED}:", rewards)
    assert len(rewards) == STEPS
    assert rewards[:KILLED] == wanted[:KILLED]  # later ones lack the rollouts of the killed node
    assert set(run["left"].values()) == {0}
    left = site.left_behind(dead=[killed])
    assert not [path for path in left if "/torchinductor_" not in path]  # that is torch's own cache
    shutil.rmtree(cluster.home / "kept")
