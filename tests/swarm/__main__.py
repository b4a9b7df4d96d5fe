"""Plays seeds, prints one JSON line, and the smallest plan of each law that was broken.

    python -m swarm --seeds 0:10000 --jobs 2
    python -m swarm --seeds 17 --turns 75 --faults kill_broker:6 --story

It is run in the folder `tests` (`make swarm`). The exit status is 1 if a law was broken.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from swarm.plan import Plan, drawn
from swarm.run import Ended, play
from swarm.shrinking import minimised


def main() -> int:
    """Plays the seeds that were asked for."""
    given = _arguments()
    plans = [_plan(seed, given) for seed in given.seeds]
    began, failures = time.monotonic(), list[Ended]()
    events, struck = 0, Counter[str]()
    for ended in _played(plans, given.jobs):
        events += ended.events
        struck.update(ended.struck)
        if ended.law:
            if given.until_failure:
                print(json.dumps({"seed": ended.plan.seed, "law": ended.law}), flush=True)
                return 1
            failures.append(ended)
            print(f"seed {ended.plan.seed}: {ended.text.strip()}", file=sys.stderr, flush=True)
    if given.story:
        print("\n".join(ended_line for ended in failures or [play(plans[0])]
                        for ended_line in ended.log))
    took_s = time.monotonic() - began
    for law in dict.fromkeys(ended.law for ended in failures):
        first = next(ended for ended in failures if ended.law == law)
        small = minimised(first) if given.minimise else first
        print(f"{law}: python -m swarm {small.plan.show()} --story", file=sys.stderr, flush=True)
    print(json.dumps({
        "seeds": len(plans), "events": events, "faults": dict(struck.most_common()),
        "failures": {law: [e.plan.seed for e in failures if e.law == law][:20]
                     for law in dict.fromkeys(e.law for e in failures)},
        "seconds": round(took_s, 1), "seeds_per_s": round(len(plans) / took_s, 2)}), flush=True)
    return int(bool(failures))


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m swarm", description=__doc__)
    p.add_argument("--seeds", type=seed_range, default="0:1000", help="FROM:TO, or one seed")
    p.add_argument("--jobs", type=int, default=2, help="processes")
    p.add_argument("--turns", type=int, help="turns of each run; else drawn")
    p.add_argument("--workers", type=int, help="workers; else drawn")
    p.add_argument("--clients", type=int, help="clients; else drawn")
    p.add_argument("--faults", help="KIND:RATE,...; else drawn; - for none")
    p.add_argument("--sync", choices=("none", "batch", "always"), help="mode of the journal")
    p.add_argument("--checkpoint", type=int, help="events between two checkpoints; else drawn")
    p.add_argument("--acts", type=float, help="share of turns in which somebody acts; else drawn")
    p.add_argument("--story", action="store_true", help="print what happened in a failing run")
    p.add_argument("--until-failure", action="store_true", help="end with the first failure")
    p.add_argument("--no-minimise", dest="minimise", action="store_false")
    return p.parse_args()


def seed_range(text: str) -> range:
    """The seeds that a text names; its own name is part of argparse's message."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def _plan(seed: int, given: argparse.Namespace) -> Plan:
    plan = drawn(seed)
    asked = {name: getattr(given, name)
             for name in ("turns", "workers", "clients", "sync", "checkpoint", "acts")
             if getattr(given, name) is not None}
    if given.faults is not None:
        pairs = [each.split(":") for each in given.faults.split(",") if each != "-"]
        asked["rates"] = {kind: float(rate) for kind, rate in pairs}
    return replace(plan, **asked)


def _played(plans: list[Plan], jobs: int) -> Iterator[Ended]:
    if jobs <= 1 or len(plans) == 1:
        yield from map(play, plans)
        return
    os.environ["PYTHONHASHSEED"] = "0"
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(play, plans, chunksize=8)


if __name__ == "__main__":
    sys.exit(main())
