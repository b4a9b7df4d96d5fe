"""On a real Slurm a broker that no worker joins says why, and does not hold its nodes for ever."""

from __future__ import annotations

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
    told = site.cluster.run_as_user(
        ["sbatch", "--parsable", "-J", "nobody", "-p", "cpu", "-t", "5", "-n", "1", "-o",
         "nobody-%j.out"], input=SCRIPT.format(venv=site.venv))
    job = told.stdout.strip()
    assert job.isdigit(), told.stderr
    told = site.finish("nobody", job)
    assert "waits (ReqNodeNotAvail); what for: tangram explain" in told, told
    assert f"error: job {job}: no worker has joined within" in told, told
    assert f"squeue --steps -j {job}" in told, told
    assert "run: 1" in told and "broker: 1" in told, told
