"""A standing broker: a job whose nodes serve the training runs of other Slurm jobs of the user."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
from helpers.slurm_site import DATA, Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SETTINGS = """
grace_s = 5
[tenants.math]
shares = 3
[tenants.code]
"""
CLIENT = """#!/bin/bash
source {{venv}}/bin/activate
export TANGRAM_JOB={job} TANGRAM_TENANT={tenant}
python trainer_tenant.py {tenant}
"""


def standing(site: Site) -> str:
    """The job of a broker that serves other jobs; its own trainer only waits."""
    (site.cluster.home / "standing.toml").write_text(SETTINGS)
    job = site.sbatch("standing", "sleep infinity", template="single-node", ranks=1, gateway="off",
                      mpi="none", partition="trainer", cpus_lent="8", mem="1800",
                      config="standing.toml")
    site.until(lambda: site.info(job).get("nodes"), "the broker and its worker", 90,
               lambda: site.output("standing", job))
    return job


def open_actions(site: Site, job: str, tenant: str) -> list[dict[str, Any]]:
    """The rows of `tangram acct` of the tenant's actions that have not ended."""
    return [row for row in site.acct(job) if row["tenant"] == tenant
            and row["state"] in ("PENDING", "CONFIGURING", "RUNNING")]


def test_trainings_of_other_jobs_attach_and_one_that_is_cancelled_leaves_the_other_alone(
        site: Site) -> None:
    job = standing(site)
    shutil.copy(DATA / "trainer_tenant.py", site.cluster.home)
    clients = {tenant: site.script(tenant, CLIENT.format(job=job, tenant=tenant))
               for tenant in ("math", "code")}

    def lines(tenant: str) -> int:
        return site.output(tenant, clients[tenant]).count(f"{tenant}: ")

    def said(tenant: str) -> str:
        return site.output(tenant, clients[tenant])

    for tenant in clients:
        site.until(partial(lambda tenant: lines(tenant) >= 2, tenant), f"{tenant} to work", 90,
                   partial(said, tenant))
    assert site.info(job)["sessions"] == 2
    site.cluster.run_as_user(["scancel", clients["math"]], check=True)
    site.until(lambda: not open_actions(site, job, "math"), "the actions of math to end", 60)
    site.until(lambda: site.info(job)["sessions"] == 1, "its session to end", 60)
    before = lines("code")
    site.until(lambda: lines("code") >= before + 2, "code to go on", 60)
    (site.cluster.home / "code.stop").touch()
    assert "code: over" in site.finish("code", clients["code"])
    rows = [row for row in site.acct(job) if row["tenant"] in clients]
    for row in rows:
        assert row["client_name"].endswith(f" of job {clients[row['tenant']]}"), row
    states = {name: {row["state"] for row in rows if row["name"] == name}
              for name in ("math-long", "code-long", "code-single", "code-inside")}
    assert states == {"math-long": {"CANCELLED"}, "code-long": {"CANCELLED"},
                      "code-single": {"COMPLETED"}, "code-inside": {"COMPLETED"}}
    site.cluster.run_as_user(["scancel", "--batch", "--signal=TERM", job], check=True)
    site.finish("standing", job)
    assert not site.left_behind()
