"""The hostile suite inside a real job step, as the cluster's user, who may write no cgroup."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.ordinary_user import TESTS as HERE
from helpers.slurm_site import Site
from test_hostile_user import SUITE

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]


def test_the_hostile_suite_passes_in_a_job_step(site: Site) -> None:
    place = Path(site.cluster.home) / "hostile"
    shutil.copytree(HERE / "helpers", place / "helpers")
    for name in (*SUITE, "conftest.py"):
        shutil.copy(HERE / name, place / Path(name).name)
    command = (f"cd {place} && TMPDIR=/tmp srun -p cpu -N1 -n1 -c2 --mem=4000 --time=9 "
               f"{site.venv}/bin/python -B -m pytest -q -p no:cacheprovider -n 2 -m 'not long' "
               f"-o markers='long: minutes' -W ignore --basetemp={place}-base "
               f"{' '.join(Path(name).name for name in SUITE)}")
    done = site.cluster.run_as_user(command, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "[process" not in done.stdout.partition("short test")[2]
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))
