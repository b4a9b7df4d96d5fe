"""reportseff, a program for sacct, reads `tangram acct` in its place (docs/SLURM.md)."""

from __future__ import annotations

import pytest
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(400)]

SCRIPT = """#!/bin/bash
source {venv}/bin/activate
tangram broker &
while ! tangram info >/dev/null 2>&1; do sleep 0.5; done
srun -n 1 tangram worker &
tangram run -- python3 -c 'sum(range(2 * 10 ** 8))'
tangram shutdown
wait
"""


def test_reportseff_reads_the_rows_of_a_job(site: Site) -> None:
    tools = install_for(site.cluster, ("reportseff",))
    job = site.script("seff", SCRIPT)
    output = site.finish("seff", job)
    folder = site.cluster.home / "as-sacct"
    site.cluster.run_as_user(["mkdir", "-p", str(folder)])
    site.cluster.run_as_user(["tee", str(folder / "sacct")], input=(
        f'#!/bin/sh\nexec {site.venv}/bin/tangram acct --sacct "$@"\n'))
    site.cluster.run_as_user(["chmod", "755", str(folder / "sacct")])
    told = site.cluster.run_as_user(
        f"PATH={folder}:$PATH {tools}/bin/reportseff --no-color --format "
        f"JobID,State,CPUEff,MaxRSS,AllocCPUS {job}")
    assert told.returncode == 0, (told.stderr, output)
    row = told.stdout.splitlines()[-1].split()
    assert row[:2] == [job, "COMPLETED"], told.stdout
    options = f"-X -n -P -j {job} -o"
    cpu, elapsed = site.cluster.run_as_user(
        f"{site.venv}/bin/tangram acct --sacct {options} TotalCPU,ElapsedRaw"
    ).stdout.strip().split("|")
    held = site.cluster.run_as_user(f"sacct {options} AllocCPUS").stdout.strip()
    minutes, seconds = cpu.split(":")
    used = 60 * int(minutes) + int(float(seconds))  # reportseff reads whole seconds
    efficiency = 100 * used / (int(elapsed) * int(held))
    assert used and abs(float(row[2].rstrip("%")) - efficiency) < 0.1, (
        told.stdout, cpu, elapsed, held)
    assert row[3].endswith("M") and row[4] == held
