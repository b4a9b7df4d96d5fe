"""The Slurm port on a real Slurm: one contract for both adapters, and the budget above them."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from helpers.slurm_site import DATA, Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def foreign_job(site: Site) -> str:
    """A running job of another user: root's."""
    told = site.cluster.run_as_user(
        ["sbatch", "--parsable", "-n1", "--mem=50", "-p", "trainer", "-o", "/dev/null", "--wrap",
         "sleep 600"], user=0, group=0, extra_groups=[], cwd="/")
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def lacking(site: Site, adapter: str) -> str:
    """Why this adapter cannot be used on this cluster; empty when it can."""
    if adapter == "cli":
        return ""
    told = site.cluster.run_as_user([site.venv / "bin/python", "-c", "import pyslurm"])
    said = told.stderr.strip().rpartition("\n")[2]
    release = site.cluster.run_as_user(["sbatch", "--version"]).stdout.strip()
    return f"pyslurm cannot be imported beside {release}: {said}" if told.returncode else ""


@pytest.mark.parametrize("adapter", ["cli", "pyslurm"])
def test_each_adapter_keeps_the_contract(site: Site, adapter: str) -> None:
    if why := lacking(site, adapter):
        pytest.skip(why)
    shutil.copy(DATA / "slurm_contract.py", site.cluster.home)
    job = foreign_job(site)
    try:
        told = site.cluster.run_as_user(
            [str(site.venv / "bin/python"), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
             "--basetemp=contract", "--durations=5", "slurm_contract.py"], timeout=240,
            env={"CONTRACT_ADAPTER": adapter, "CONTRACT_FOREIGN": job, "CONTRACT_ACCOUNTING": "1"})
    finally:
        site.cluster.run_as_user(["scancel", job], user=0, group=0, extra_groups=[])
    print(told.stdout)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "skipped" not in told.stdout


JOB = """#!/bin/bash
set -e
export PATH={venv}/bin:$PATH
cd ~
tangram broker --nodes 1 --bind none &
until [ -s ~/.tangram/jobs/$SLURM_JOB_ID/access.json ]; do sleep 0.1; done
tangram worker --cpus 2 --devices none &
python - <<'END'
import json
import tangram_hpc
with tangram_hpc.connect() as client:
    futures = [client.submit(["/bin/true"]) for _ in range(ACTIONS)]
    futures.append(client.submit(["/bin/false"]))
    assert sum(future.result(300).ok for future in futures) == ACTIONS
    json.dump(client.ask("info"), open("remark.json", "w"))
    client.shutdown_broker("all is done")
END
wait
"""


def in_accounting(site: Site, job: str) -> str:
    """`State|UID|Comment`."""
    return site.cluster.run_as_user(
        ["sacct", "-n", "-X", "-P", "-j", job, "-o", "State,UID,Comment"]).stdout.strip()


def run_job(site: Site, actions: int) -> str:
    """Runs a job with a broker, a worker and `actions` successful actions; returns its id at its
    end."""
    script = JOB.replace("{venv}", str(site.venv)).replace("ACTIONS", str(actions))
    told = site.cluster.run_as_user(
        ["sbatch", "--parsable", "-n1", "-c2", "--mem=300", "-p", "cpu", "--comment=grant 7",
         "-o", "remark.out"], input=script)
    assert told.returncode == 0, told.stderr
    job = told.stdout.strip()
    owner = site.cluster.run_as_user("id -u").stdout.strip()
    site.until(lambda: in_accounting(site, job).startswith(f"COMPLETED|{owner}|"), "the end", 120,
               lambda: in_accounting(site, job) + (site.cluster.home / "remark.out").read_text())
    return job


def test_a_job_leaves_its_summary_in_its_comment(site: Site) -> None:
    """The summary follows the user's own comment; no action made a Slurm call."""
    job = run_job(site, 300)
    said = (site.cluster.home / "remark.out").read_text()
    assert "tangram:" not in said, said
    comment = in_accounting(site, job).split("|")[2]
    assert re.fullmatch(
        r"grant 7; tangram: actions=301 act_mean=\d+\.\d{3}s cpu_held=\d+\.\d\dh cpu_lent=\d+% "
        r"cpu_used=\d+% completed=300 failed=1", comment), comment
    asked = json.loads((site.cluster.home / "remark.json").read_text())["slurm"]
    assert asked == {"filling": "cli", "submits": 0, "queries": 0, "cancels": 0, "comments": 0,
                     "failed": 0, "refused": 0, "held_back": 0, "closed_s": 0, "last_error": ""}
    site.cluster.run_as_user(["sacctmgr", "-i", "modify", "job", "where", f"jobid={job}", "set",
                              "comment=grant 8"], check=True)
    told = site.tangram("acct", "-j", job, "--comment")
    assert told.returncode == 0, told.stderr
    new = "|grant 8; tangram: " + told.stdout.strip()
    site.until(lambda: in_accounting(site, job).endswith(new), "the comment", 20,
               lambda: in_accounting(site, job))
    assert comment.endswith(told.stdout.strip())


def test_a_summary_for_an_unknown_slurm_job_is_refused(site: Site) -> None:
    told = site.tangram("acct", "-j", "99999999", "--comment")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr


def asked_of_slurm(site: Site) -> int:
    """Requests of the cluster's user that slurmctld counted since its counters were reset;
    accounting is another daemon's."""
    told = site.cluster.run_as_user(["sdiag"], user=0, group=0, extra_groups=[]).stdout
    found = re.search(rf"^\s*{site.cluster.user}\s*\(\s*\d+\)\s*count:(\d+)", told, re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.long
def test_a_job_makes_as_many_slurm_rpcs_for_10000_actions_as_for_100(site: Site) -> None:
    counts, steps = [], []
    for actions in (100, 10_000):
        site.cluster.run_as_user(["sdiag", "-r"], user=0, group=0, extra_groups=[], check=True)
        job = run_job(site, actions)
        counts.append(asked_of_slurm(site))
        told = site.cluster.run_as_user(["sacct", "-n", "-P", "-j", job, "-o", "JobID"]).stdout
        steps.append(told.count("."))
        assert f"completed={actions} " in in_accounting(site, job)
    print("requests", counts, "steps", steps)
    assert counts[0] == counts[1] and 2 <= counts[0] <= 8, counts
    assert steps == [1, 1]
