"""The Slurm port on a real Slurm: one contract for both fillings, and the budget above them."""

from __future__ import annotations

import shutil

import pytest
from slurm_site import DATA, Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def foreign_job(site: Site) -> str:
    """A running job of another user: root's."""
    told = site.cluster.run_as_user(
        ["sbatch", "--parsable", "-n1", "--mem=50", "-p", "trainer", "-o", "/dev/null", "--wrap",
         "sleep 600"], user=0, group=0, extra_groups=[], cwd="/")
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_commands_keep_the_contract(site: Site) -> None:
    shutil.copy(DATA / "slurm_contract.py", site.cluster.home)
    job = foreign_job(site)
    try:
        told = site.cluster.run_as_user(
            [str(site.venv / "bin/python"), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
             "--durations=5", "slurm_contract.py"], timeout=240,
            env={"CONTRACT_FILLING": "cli", "CONTRACT_FOREIGN": job, "CONTRACT_ACCOUNTING": "1"})
    finally:
        site.cluster.run_as_user(["scancel", job], user=0, group=0, extra_groups=[])
    print(told.stdout)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "skipped" not in told.stdout
