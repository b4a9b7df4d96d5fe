"""On a real Slurm `tangram clean` keeps the folder of a job that waits in the queue."""

from __future__ import annotations

import json
import re

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


def test_the_folder_of_a_job_in_the_queue_stays_until_the_job_is_cancelled(site: Site) -> None:
    told = site.cluster.run_as_user(["sbatch", "--parsable", "--hold", "-p", "cpu", "-t", "5"],
                                    input="#!/bin/sh\ntrue\n")
    job = told.stdout.strip()
    assert job.isdigit(), told.stderr
    conf = site.cluster.run_as_user(["scontrol", "show", "config"]).stdout
    cluster = re.search(r"ClusterName\s*=\s*(\S+)", conf)
    assert cluster is not None
    name = f"{job}@{cluster[1]}"
    folder = site.cluster.home / ".tangram" / "jobs" / name
    site.cluster.run_as_user(["mkdir", "-p", str(folder)])
    site.cluster.run_as_user(["touch", "-d", "1 day ago", str(folder / "journal")])

    def state() -> tuple[str, str]:
        rows = json.loads(site.tangram("clean", "--json", "--older-than", "12h").stdout)["folders"]
        row = next(row for row in rows if row["job"] == name)
        return row["state"], row["done"]

    assert state() == ("queued", "") and folder.exists()
    told = site.tangram("clean", job)
    assert told.returncode == 1 and "stays: Slurm has its job" in told.stdout
    site.cluster.run_as_user(["scancel", job])
    site.until(lambda: site.state(job) in ("", "CANCELLED"), "the job to be cancelled")
    assert state() == ("ended", "removed") and not folder.exists()
