"""On a real Slurm a broker that no worker joins says why, and does not hold its nodes for ever."""

from __future__ import annotations

import subprocess

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

SCRIPT = """#!/bin/bash
source {venv}/bin/activate
export TANGRAM_NO_WORKER_S=8
tangram broker &
while ! tangram info >/dev/null 2>&1; do sleep 0.5; done
tangram run -- true
echo "run: $?"
wait $!
echo "broker: $?"
"""


def test_a_job_whose_workers_do_not_start_ends_and_says_why(site: Site) -> None:
    job = site.script("no-worker", SCRIPT)
    told = site.finish("no-worker", job)
    assert "is pending (ReqNodeNotAvail); `tangram explain -j" in told, told
    assert f"error: job {job}: no worker has joined within" in told, told
    assert f"squeue --steps -j {job}" in told, told
    assert "run: 1" in told and "broker: 1" in told, told


def test_a_broker_beside_salloc_ends_with_its_job(site: Site) -> None:
    log = site.cluster.home / "salloc-broker.log"
    inside = (f"source {site.venv}/bin/activate; echo $SLURM_JOB_ID > salloc-job; "
              f"setsid tangram broker > {log} 2>&1 & srun -n 1 tangram worker")
    salloc = subprocess.Popen(
        ["salloc", "-p", "cpu", "-t", "5", "-n", "1", "-Q", "bash", "-c", inside],
        stdin=subprocess.DEVNULL, **site.cluster.as_user())
    try:
        number = site.cluster.home / "salloc-job"
        site.until(lambda: number.exists() and number.read_text().strip(), "salloc to begin")
        job = number.read_text().strip()
        site.until(lambda: site.info(job).get("nodes"), "a worker to join",
                   told=lambda: log.read_text())
        site.cluster.run_as_user(["scancel", job])
        site.until(lambda: f"job {job} has ended, and the broker with it" in log.read_text(),
                   "the broker to end", 100, lambda: log.read_text())
        told = site.tangram("info", "-j", job)
        assert told.returncode != 0
    finally:
        salloc.terminate()
        salloc.wait(30)
