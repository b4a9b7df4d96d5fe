"""The broker of a real job is killed by SIGKILL under load, in each layout, and its template starts
it again: trainers over MPI, sessions and actions go on, each action is executed and answered once,
and the ranks come back through their gateway."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from helpers.slurm_site import Site
from test_slurm_templates import LAYOUTS, SATELLITES

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]
KILLS, RANKS = 4, 2  # `tangram broker --restarts 5` starts it again five times within ten minutes


def broker_pid(site: Site, job: str) -> int:
    """The pid of the broker that the access file names; 0 while there is none."""
    try:
        text = (site.cluster.home / f".tangram/jobs/{job}/access.json").read_text()
        return int(json.loads(text)["pid"])
    except (OSError, ValueError):
        return 0


def kill_broker(site: Site, job: str, rng: random.Random) -> float:
    """Kills it under load; returns when, once another one serves."""
    old = broker_pid(site, job)
    at = time.time()
    os.kill(old, signal.SIGKILL)
    site.until(lambda: broker_pid(site, job) not in (0, old), "another broker", 60)
    time.sleep(rng.uniform(3, 6))
    return at


def pauses(ledgers: list[dict[str, Any]], kills: list[float]) -> list[float]:
    """For each kill and each thread of a trainer: the time without a result, less the usual one."""
    found = []
    for ends in (ends for ledger in ledgers for ends in ledger["ends"].values()):
        gaps = list(pairwise(ends))
        usual = statistics.median(b - a for a, b in gaps)
        found += [b - a - usual for at in kills for a, b in gaps if a <= at < b]
    return sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broker_that_is_killed_costs_a_job_only_a_pause(site: Site, layout: str) -> None:
    name, rng = "dies" + layout.replace("-", ""), random.Random(layout)
    home, go = site.cluster.home, site.cluster.home / f"{name}.go"
    job = site.sbatch(name, f"python trainer_broker_dies.py {name}.json {go.name} {name}.effects",
                      "trainer_broker_dies.py", template=layout, ranks=RANKS, **LAYOUTS[layout])
    others = [site.submit("satellite", f"{name}{n}", broker=job, time="10", **keys)
              for n, keys in enumerate(SATELLITES) if layout == "satellites"]
    site.until(lambda: len([r for r in acct(site, job) if r["state"] == "COMPLETED"]) > 40,
               "work to flow", 120, lambda: site.output(name, job))
    kills = [kill_broker(site, job, rng) for _ in range(KILLS)]
    go.touch()
    said = site.finish(name, job, 200)
    for n, other in enumerate(others):
        site.finish(f"{name}{n}", other)
    ledgers = [json.loads((home / f"{name}.json.{rank}").read_text()) for rank in range(RANKS)]
    took = pauses(ledgers, kills)
    done = sum(len(ends) for ledger in ledgers for ends in ledger["ends"].values())
    print(f"{layout}: {KILLS} kills, {done} actions, pause p50 {took[len(took) // 2]:.2f} s, max "
          f"{took[-1]:.2f} s, ends by {[ledger['via'] for ledger in ledgers]}")
    assert [ledger["wrong"] for ledger in ledgers] == [[], []], said
    assert {(ledger["kept"], ledger["whole"], ledger["attempt"]) for ledger in ledgers} == {
        ("kept", True, 1)}
    assert {ledger["via"] for ledger in ledgers} == {"mpi"}, said
    effects = Counter((home / f"{name}.effects").read_text().split())
    assert set(effects.values()) == {1} and len(effects) == done + RANKS, effects.most_common(5)
    rows = [r for r in site.acct(job) if r["kind"] in ("exec", "call", "function")]
    assert {(r["state"], r["attempt"]) for r in rows} == {("COMPLETED", 1)}, Counter(
        (r["kind"], r["state"], r["attempt"]) for r in rows)
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))


def acct(site: Site, job: str) -> list[dict[str, Any]]:
    """As `site.acct`; empty while there is no journal."""
    told = site.tangram("acct", "-j", job, "--json")
    return json.loads(told.stdout)["actions"] if told.returncode == 0 else []
