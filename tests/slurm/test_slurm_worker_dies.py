"""The only worker of a single-node job is killed: the job's script starts another one, which lends
the node again. A worker that was told to leave is not started again."""

from __future__ import annotations

import functools
import os
import signal

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(300)]
# not the shell and srun, whose arguments have `tangram worker` too
WORKER = r"python[0-9.]* [^ ]*/tangram worker"


def workers(site: Site) -> list[int]:
    return site.pids(WORKER)


def is_replaced(site: Site, old: int) -> bool:
    return workers(site) not in ([], [old])


def works(site: Site, job: str) -> bool:
    """Whether an action that is submitted now runs on the job's node."""
    told = site.tangram("run", "-j", job, "--", "echo", "works", timeout=60)
    return told.stdout == "works\n"


def test_a_killed_worker_of_a_single_node_is_started_again(site: Site) -> None:
    name, go = "wdies", site.cluster.home / "wdies.go"
    job = site.submit(
        "single-node", name, partition="scav", cpus_lent="2", ranks="1", gateway="off", mpi="none",
        time="10", trainer=f"until [ -e {go.name} ]; do sleep 0.2; done")
    site.until(lambda: site.info(job).get("nodes"), "the worker to join", 90,
               lambda: site.output(name, job))
    assert works(site, job)
    for start in (1, 2):
        (old,) = workers(site)
        os.kill(old, signal.SIGKILL)
        site.until(functools.partial(is_replaced, site, old), "another worker", 60,
                   lambda: site.output(name, job))
        assert works(site, job), site.output(name, job)
        assert f"status 137 and is started again ({start} of 5 times)" in site.output(name, job)
    (last,) = workers(site)
    os.kill(last, signal.SIGTERM)
    site.until(lambda: not workers(site), "the worker to leave", 60)
    site.until(lambda: "|workers|" not in site.cluster.run_as_user(
        ["squeue", "--steps", "-h", "-j", job, "-o", "%i|%j|"]).stdout, "its step to end", 60)
    go.touch()
    said = site.finish(name, job)
    assert said.count("is started again") == 2, said
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))
