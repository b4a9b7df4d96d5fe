"""Every block of commands in README.md and the documents that needs Slurm is run on a real one, as
a user would. The placeholders that a reader fills in come from the table below; all else is as
written."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.documented import REPO, TO_RUN, Block, filled
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
BLOCKS = [b for b in TO_RUN if b.needs_slurm and not b.page.startswith("slurm/devcluster")]
DEVCLUSTER = [b for b in TO_RUN if b.needs_slurm and b.page.startswith("slurm/devcluster")]

# What a reader puts in for a word of a page, besides JOB and ACTION. The dev cluster has no account
# `mygroup`, and its partition for jobs that may be preempted is called `scav`; its nodes have four
# GPUs and 16 CPUs. `...` in a line of srun stands for the options of the reader's own step.
WORDS = {
    "srun ... tangram rank": "srun --jobid=JOB --overlap --ntasks=2 --mpi=none tangram rank",
    "account=mygroup": "account=", "partition=scavenge": "partition=scav", "cpus=32": "cpus=4",
    "gres=gpu:8": "gres=gpu:4", "gres_trainer=gpu:8": "gres_trainer=gpu:4",
    "WORK": "coding-200", "C.json": "coding-200"}
SCENARIO = """
[elastic]
max_nodes = 1
max_core_hours = 9
[[elastic.satellites]]
name = "spare"
cpus = 64
mem_mib = 600000
time_min = 10
[slurm]
wait_s = 1
"""
TRAIN = """import tangram_hpc
with tangram_hpc.connect() as client:
    assert client.submit(pow, 2, 5).result(60) == 32
"""


@dataclass
class Held:
    """A job that runs while the pages are read, an action of it, and the reader's folder."""

    site: Site
    job: str
    action: str
    folder: Path


@pytest.fixture(scope="module")
def held(site: Site) -> Iterator[Held]:
    stop = site.cluster.home / "documented.stop"
    job = site.sbatch("documented", f"python trainer_hold.py {stop.name}", "trainer_hold.py",
                      ranks=1, template="single-node", partition="trainer", cpus_lent="8",
                      mem="1200", gateway="off", mpi="none")
    try:
        site.until(lambda: len(site.info(job).get("nodes", [])) == 1, "the worker to join", 90,
                   lambda: site.output("documented", job))
        told = site.tangram("run", "-j", job, "-J", "mine", "--", "true")
        assert told.returncode == 0, told.stderr
        action = next(r["action"] for r in site.acct(job) if r["name"] == "mine")
        yield Held(site, job, action, site.cluster.home)
    finally:
        stop.touch()
        site.finish("documented", job)


def reader(held: Held, text: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """A script in a folder of the reader's own, in which pytest finds a test and `train.py` is."""
    folder = held.folder / "reading"
    shutil.rmtree(folder, ignore_errors=True)
    held.site.cluster.run_as_user(["mkdir", str(folder)], check=True)
    for name, content in (("train.py", TRAIN), ("test_it.py", "def test(): assert 1 + 1 == 2\n"),
                          ("scenario.toml", SCENARIO)):
        held.site.cluster.run_as_user(["tee", name], input=content, cwd=folder, check=True)
    path = f"{held.site.venv}/bin:{held.site.cluster.env['PATH']}"
    return held.site.cluster.run_as_user(["bash", "-euo", "pipefail", "-c", text], cwd=folder,
                                         env={"PATH": path}, timeout=timeout)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)
def test_documented_commands_run_on_a_real_slurm(block: Block, held: Held) -> None:
    """Each command of the block succeeds; a batch job that it submits starts and completes."""
    text = filled(block.text, WORDS)
    text = filled(text, {"JOB": held.job, "ACTION": held.action})
    before = set(queue(held.site))
    if "trainer.sbatch" in text:  # the page has rendered it in its text, from template `satellites`
        text = ("tangram template render satellites -o partition=trainer -o time=5 -o gateway=off "
                "-o mpi=none -o trainer='python train.py' --output trainer.sbatch\n" + text)
    told = reader(held, text)
    assert told.returncode == 0, f"{block.page}:{block.line}\n{told.stdout}\n{told.stderr}"
    submitted = re.findall(r"Submitted batch job (\d+)", told.stdout)
    assert len(submitted) >= len(re.findall(r"^[^#\n]*(?<![\w.(-])sbatch (?!--parsable)", text,
                                            re.MULTILINE))
    for job in {*submitted, *{j for j in queue(held.site) if j not in before}}:
        ended_well(held.site, job)


def queue(site: Site) -> list[str]:
    """The user's jobs that wait or run."""
    told = site.cluster.run_as_user(["squeue", "-h", "-o", "%A"], check=True)
    return told.stdout.split()


def ended_well(site: Site, job: str) -> None:
    """Waits for the end of a job; it and all its components must be COMPLETED."""
    def states() -> list[str]:
        told = site.cluster.run_as_user(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State"])
        found = told.stdout.split()
        over = found and not {"PENDING", "RUNNING", "REQUEUED"} & set(found)
        return found if over and job not in queue(site) else []

    def said() -> str:
        files = (site.cluster.home / "reading").glob("*.out")
        return "\n".join(f"{f.name}: {f.read_text()}" for f in files)

    found = site.until(states, f"job {job} to end", 150, said)
    assert set(found) == {"COMPLETED"}, (found, said())


@pytest.mark.parametrize("block", DEVCLUSTER, ids=lambda b: b.name)
def test_the_documented_dev_cluster_boots(block: Block) -> None:
    """From the checkout, as root, with another name, as a dev cluster may run here already."""
    text = filled(block.text, {"devcluster up": "devcluster up --name doc",
                               "devcluster exec": "devcluster exec --name doc",
                               "devcluster down": "devcluster down --name doc"})
    try:
        told = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=REPO, timeout=250,
                              capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        assert "PARTITION" in told.stdout
    finally:
        subprocess.run(["slurm/devcluster/devcluster", "down", "--name", "doc"], cwd=REPO,
                       capture_output=True, check=False)
