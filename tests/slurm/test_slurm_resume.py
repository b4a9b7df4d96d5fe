"""A job whose work takes longer than its time limit, on a real Slurm: drained, requeued and
continued."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(1500)]
COUNT, SECONDS = 240, 5  # on four nodes, one at a time on each: five minutes


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A requeued job may start again as soon as its old credentials have expired: 120 s by default,
    `cred_expire` sets it."""
    name = f"q{os.getpid()}"
    prefix = f"/tmp/devcluster-{name}"
    with running_cluster(tmp_path_factory, name=name, prefix=prefix, cpu_nodes=2, gpu_nodes=2,
                         trainer_nodes=1, cpus_per_node=16, conf_line=[
                             "SlurmdTimeout=300",
                             f"AuthInfo=socket={prefix}/munge/munge.sock,cred_expire=10",
                         ]) as cluster:
        yield Site(cluster, install_for(cluster))


def test_five_minutes_of_work_finish_under_a_two_minute_limit_by_requeues(quick: Site) -> None:
    site, effects = quick, quick.cluster.home / "effects"
    job = site.sbatch("once", f"python trainer_once.py {COUNT} {SECONDS} effects",
                      "trainer_once.py", time="2", warn="30", requeues="9", ranks=1)
    site.until(lambda: "are here" in said(site, job), "all of its work", 1300,
               lambda: said(site, job))
    site.finish("once", job)
    print(said(site, job))
    starts = len(re.findall(r"start \d+: found", said(site, job)))
    assert starts >= 3, said(site, job)

    # what each left in the world, and what the accounting says
    left = Counter(effects.read_text().split())
    assert left == Counter({f"w{n}": 1 for n in range(COUNT)}), left.most_common(5)
    rows = [r for r in site.acct(job) if r["once"]]
    assert Counter(r["once"] for r in rows if r["state"] == "COMPLETED") == left
    assert {r["state"] for r in rows} == {"COMPLETED"} and len(rows) == COUNT
    told = site.cluster.run_as_user(["sacct", "-n", "-X", "-P", "--duplicates", "-j", job, "-o",
                                     "State"]).stdout.split()
    assert set(told) == {"REQUEUED", "COMPLETED"}, told  # never TIMEOUT
    folder = site.cluster.home / ".tangram" / "jobs" / job
    assert len(list(folder.glob("journal*"))) == starts
    assert not (folder / "once").exists() and not (folder / "store").exists()
    assert not site.left_behind()


def said(site: Site, job: str) -> str:
    return "".join(p.read_text() for p in sorted(site.cluster.home.glob(f"once-{job}*.out")))


def queued(site: Site, job: str) -> str:
    """The state of each component, with the reason why it waits."""
    return site.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%i %T %r"]).stdout


def test_a_requeued_job_keeps_what_it_promises_for_each_kind_of_work(quick: Site) -> None:
    """`scontrol requeue` in the middle of its work: row by row what docs/FAULTS.md says of a job
    that is requeued."""
    site, effects = quick, quick.cluster.home / "requeued.effects"
    effects.unlink(missing_ok=True)
    job = site.sbatch("rq", f"python trainer_requeued.py {effects.name}", "trainer_requeued.py",
                      ranks=1)
    log = site.cluster.home / f"rq-{job}.1.out"
    site.until(lambda: "start 0: ready" in site.output("rq", job), "work of each kind", 120,
               lambda: site.output("rq", job))
    told = site.cluster.run_as_user(["scontrol", "requeue", job])
    assert told.returncode == 0, told.stderr
    site.until(lambda: log.exists() and "start 1: [" in log.read_text(), "the next start", 400,
               lambda: f"{queued(site, job)} {log.read_text() if log.exists() else ''}")
    said = log.read_text() + site.finish("rq", job)
    assert "start 1: ['done', 'runs', 'waits']\n" in said, said
    assert "start 1: 0 sessions\n" in said, said
    # named work: what had ended is not run again, what ran is run again, what waited ran once
    left = Counter(effects.read_text().split())
    assert {k: v for k, v in left.items() if k.endswith("ended")} == {
        "done.ended": 1, "runs.ended": 1, "waits.ended": 1}, left
    assert (left["done.begun"], left["runs.begun"], left["waits.begun"]) == (1, 2, 1), left
    rows = {r["name"]: r for r in site.acct(job)}
    # its node may have been given it ahead of its turn
    assert rows["session waits"]["state"] in ("NODE_FAIL", "CANCELLED"), rows["session waits"]
    assert {n: r["state"] for n, r in rows.items() if n not in ("write", "session waits")} == {
        "once done": "COMPLETED", "once runs": "COMPLETED", "once waits": "COMPLETED",
        "session runs": "NODE_FAIL", "plain runs": "NODE_FAIL", "plain waits": "NODE_FAIL",
        "fills": "NODE_FAIL"}, rows
    told = {name: rows[name]["reason"] for name in (
        "plain runs", "plain waits", "fills", "session runs", "session waits")}
    assert all("the broker was started again" in reason for reason in told.values()), told
    assert not site.left_behind()
