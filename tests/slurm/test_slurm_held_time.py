"""The time that a job and its components were held, by `tangram acct` and by sacct: the same, to
the second."""

from __future__ import annotations

import json

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

# The worker comes late and the script ends late: these times are the job's, and not its broker's.
SCRIPT = """#!/bin/bash
#SBATCH --cpus-per-task=3
source {venv}/bin/activate
sleep 1.5
tangram broker &
until tangram info >/dev/null 2>&1; do sleep 0.2; done
sleep 1.2
tangram worker &
tangram run -- sleep 1
tangram shutdown
wait
sleep 2.2
"""


def sacct(site: Site, job: str) -> dict[str, tuple[int, int]]:
    """Elapsed seconds and CPU seconds of each component, once sacct has all ends."""
    def told() -> list[list[str]]:
        rows = [line.split("|") for line in site.cluster.run_as_user(
            ["sacct", "-n", "-X", "-P", "-j", job, "-o", "JobID,ElapsedRaw,CPUTimeRAW,End"]
            ).stdout.splitlines()]
        return [] if any(row[3] == "Unknown" for row in rows) else rows
    return {row[0]: (int(row[1]), int(row[2])) for row in site.until(told, "sacct's ends")}


def of_job(site: Site, job: str, *words: str) -> tuple[int, int]:
    told = site.tangram("acct", "-X", "-n", "-P", "-o", "ElapsedRaw,CPUTimeRAW", "-j", job, *words)
    assert told.returncode == 0, told.stderr
    elapsed, cpu = told.stdout.split("|")
    return int(elapsed), int(cpu)


def accounts(site: Site, job: str) -> list[set[str]]:
    """The account that a job is charged to, by sacct and by the rows of its actions."""
    charged = site.cluster.run_as_user(["sacct", "-n", "-X", "-P", "-j", job, "-o", "Account"])
    told = site.tangram("acct", "-n", "-P", "-o", "Account", "-j", job)
    return [set(answer.stdout.split()) for answer in (charged, told)]


def test_a_batch_job_was_held_as_long_as_sacct_says(site: Site) -> None:
    job = site.script("span", SCRIPT)
    said = site.finish("span", job)
    site.tangram("books")  # sacct may not have the job's end yet
    wanted = sacct(site, job)[job]
    assert wanted[0] >= 5 and wanted[1] == 4 * wanted[0], said  # Slurm grants whole cores
    assert of_job(site, job) == wanted
    assert of_job(site, job, "--books") == wanted
    charged, told = accounts(site, job)
    assert told == charged and len(charged) == 1


@pytest.mark.long
def test_each_component_of_a_het_job_was_held_as_long_as_sacct_says(site: Site) -> None:
    """Those whose CPUs are lent; the trainers' component lends nothing."""
    job = site.sbatch("hetspan", "python trainer_actions.py 20", "trainer_actions.py")
    said = site.finish("hetspan", job)
    wanted = sacct(site, job)
    assert set(wanted) == {f"{job}+{n}" for n in range(3)}, said
    told = site.tangram("acct", "--held", "--json", "-j", job)
    rows = {row["job"]: row for row in json.loads(told.stdout)["allocations"]}
    assert set(rows) == {f"{job}+0", f"{job}+1"}
    for name, row in rows.items():
        span_ns = row["until"] - row["since"]
        assert (span_ns // 10**9, row["held_ns"] // 10**9) == wanted[name], (name, told.stdout)
    lent = sum(wanted[name][1] for name in rows)
    assert of_job(site, job) == (wanted[f"{job}+0"][0], lent)
    charged, charged_by_us = accounts(site, job)
    assert charged_by_us == charged and len(charged) == 1
