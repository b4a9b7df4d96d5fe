"""`scontrol suspend` and `scontrol resume` of a running job: all its processes stop on all nodes
and continue, at moments that differ from node to node, and no session or action is lost."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.slurm_site import Site

from tangram_hpc.broker.failure_detector import SILENCE_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
RANKS = 2
# What each client submits besides the service's call: its running command, one in its session (and
# one more after it), work that waits for CPUs, named work.
EACH = 3 + 8 + 1


def scontrol(site: Site, verb: str, job: str) -> None:
    """As root: users may not suspend their own jobs."""
    told = subprocess.run(["scontrol", verb, job], env=site.cluster.env, capture_output=True,
                          text=True, check=False)
    assert told.returncode == 0, told.stderr
    wanted = {"suspend": "SUSPENDED", "resume": "RUNNING"}[verb]
    site.until(lambda: site.state(job) == wanted, f"{wanted} after scontrol {verb}", 30)


def stopped(pids: list[int]) -> bool:
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
    return set(states) == {"T"}


@pytest.mark.parametrize("away_s", [
    pytest.param(2.0, id="for a moment"),
    pytest.param(4 * SILENCE_S, id="for much longer than a worker may be silent",
                 marks=pytest.mark.long)])
def test_sessions_and_actions_survive_a_suspended_job(site: Site, away_s: float) -> None:
    """Those of the trainers, which are suspended too, over MPI, and those of a client on the login
    side, which is not suspended and gets no answer meanwhile. Nobody is blamed."""
    name = f"suspend{away_s:.0f}"
    go, goes_first = (site.cluster.home / f"{name}.{end}" for end in ("go", "first"))
    job = site.sbatch(name, f"python trainer_suspended.py {go.name}", "trainer_suspended.py",
                      ranks=RANKS,
                      setup=f"source {site.venv}/bin/activate; export TANGRAM_DEVICES=fake")
    site.until(lambda: site.output(name, job).count("ready") == RANKS, "both ranks to be ready",
               90, lambda: site.output(name, job))
    outside = subprocess.Popen(
        [str(site.venv / "bin/python"), "trainer_suspended.py", goes_first.name], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **{
            **site.cluster.as_user(), "env": {**site.cluster.env, "TANGRAM_JOB": job}})
    assert outside.stdout is not None and "ready" in outside.stdout.readline()
    ours = site.pids("bin/tangram (broker|worker|gateway)")
    assert len(ours) == 2 + 4 + 1  # the broker has a parent, which would start it again
    scontrol(site, "suspend", job)
    site.until(lambda: stopped(ours), "all of the job's processes to stop", 30)
    time.sleep(away_s)
    assert stopped(ours)
    scontrol(site, "resume", job)
    goes_first.touch()  # the broker ends with its trainers
    said, complaints = outside.communicate(timeout=180)
    assert said == "kept and whole, attempt {1}, by socket\n", (said, complaints)
    go.touch()
    said = site.finish(name, job)
    assert said.count("kept and whole, attempt {1}, by mpi\n") == RANKS, said
    assert "silent" not in said and "lost" not in said and "stuck" not in said, said
    rows = [row for row in site.acct(job) if row["kind"] in ("exec", "call")]
    assert {(row["state"], row["attempt"]) for row in rows} == {("COMPLETED", 1)}
    assert Counter(row["kind"] for row in rows) == {"exec": EACH * (RANKS + 1), "call": RANKS + 1}
