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
