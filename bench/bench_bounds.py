"""Shows whether memory, store and journal of a long job are bounded, and what grows by design.

The parts `names`, `results`, `week` and `churn` run in one process with a played clock
(`bounds_job.py`): actions with distinct names, acknowledged results of 64 KiB, a week in which
workers and clients mostly send signs of life, and all else that comes and goes. The part `live`
runs actions on a `LocalCluster` and looks at the memory of all its processes.

Slopes are those of the second half of a part, for one action (in `week` for one sign of life, in
`churn` for one round). The status is 1 if something grows that may not: small objects by more than
`BLOCKS`, which is exact, or resident memory by more than `NOISE` in the second half, which finds
large ones. Files of the store, the spool and the spill files have bounds of their own. The journal
may grow, because `tangram acct` needs its events; how much is told.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bounds_churn import churn
from bounds_job import PlayedJob
from bounds_live import live
from common import line
from growth import Growth

BLOCKS = 0.01  # objects each: what is kept of one action in a hundred, or of each session, shows
NOISE = 8 << 20  # bytes: a checkpoint's thread takes 5 MiB now and then, and gives them back late
SIGNS = 6 * 1800  # signs of life in an hour, of four clients and two workers
PAUSE_S = 1.0  # after a hundred actions: without it, a whole run would be shorter than the grace


def names(job: PlayedJob, count: int, growth: Growth) -> None:
    """Actions of which each has a name of its own. Every other name has a number in it, as a file's
    name has, and the others are words."""
    client, every = job.client("names"), max(100, count // 40)
    for done in range(0, count, 100):
        if done % every == 0:
            growth.sample(done)
        if done == count // 200 * 100:
            growth.half()
        for n in range(done, done + 100):
            client.submit(f"run_{n}.py" if n % 2 else "tool " + _word(n))
        client.settle()
        job.run(PAUSE_S)
    growth.sample(count)


def _word(number: int) -> str:
    """A word without digits for each number."""
    return "".join(chr(97 + int(digit)) for digit in str(number))


def results(job: PlayedJob, count: int, growth: Growth) -> None:
    """Results of 64 KiB, which the client acknowledges. Of a hundred, one has an idempotency key
    that is forgotten later, and one is too large for a message; one key in ten thousand stays for
    the whole run.
    """
    client, every = job.client("results"), max(100, count // 40)
    job.result = bytes(range(256)) * 256
    for done in range(0, count, 100):
        if done % every == 0:
            growth.sample(done)
        if done == count // 200 * 100:
            growth.half()
        for n in range(done, done + 98):
            client.submit(f"tool {n % 40}")
        client.submit("large")
        stays = done % 10_000 == 0
        client.submit("reward", once=f"{'kept' if stays else 'step'}/{done}")
        client.settle()
        if done % 1000 == 0:
            client.forget("step/")
        job.run(PAUSE_S)
    growth.sample(count)


def week(job: PlayedJob, hours: int, growth: Growth) -> None:
    """Hours in which four clients and the workers send signs of life, and one action runs in ten
    minutes."""
    clients = [job.client(f"week-{n}") for n in range(4)]
    for hour in range(hours):
        growth.sample(hour * SIGNS)
        if hour == hours // 2:
            growth.half()
        for _ in range(6):
            clients[hour % 4].submit("tool")
            clients[hour % 4].settle()
            job.run(600.0)
    growth.sample(hours * SIGNS)


PARTS: dict[str, tuple[Callable[[PlayedJob, int, Growth], None], int, int]] = {
    # function, units of work, and those of a tiny run
    "names": (names, 1_000_000, 2000), "results": (results, 1_000_000, 400),
    "week": (week, 168, 1), "churn": (churn, 20_000, 20)}


def played(name: str, count: int, trace: bool) -> dict[str, Any]:
    """Runs a part in this process; returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        job = PlayedJob(Path(folder) / "jobs" / "bounds", 2)
        growth = Growth(job.look, trace)
        PARTS[name][0](job, count, growth)
        growth.told()
        actions = sum(client.ended for client in job.clients)
        figures = {
            "units": count, "actions": actions, "cpu_s": round(time.process_time() - began, 1),
            "peak_rss_mib": round(growth.peak("rss") / 2**20, 1),
            "rss_bytes_each": round(growth.second_half("rss"), 2),
            "rss_grown_mib": round(growth.second_half("rss") * growth.last("done") / 2**21, 2),
            "blocks_each": round(growth.second_half("blocks"), 4),
            "journal_bytes_each": round(growth.second_half("journal"), 1),
            "events": int(growth.last("events")), "segments": int(growth.last("segments")),
            "store_mib": round(growth.peak("store") / 2**20, 2),
            "store_files_at_end": int(growth.last("store_files")),
            "spool_mib": round(growth.peak("spool") / 2**20, 2),
            "spool_files_at_end": int(growth.last("spool_files")),
            "overflow_mib": round(growth.peak("overflow") / 2**20, 2)}
        job.close()
        return figures


def unbounded(name: str, told: dict[str, Any]) -> list[str]:
    """Names the figures of a part that say that something grows without a bound."""
    found = []
    if told["blocks_each"] > BLOCKS:
        found.append(f"{name}: {told['blocks_each']} objects each")
    if told["rss_grown_mib"] * 2**20 > NOISE:
        found.append(f"{name}: {told['rss_grown_mib']} MiB of memory in its second half")
    if told["store_files_at_end"] > 1 or told["overflow_mib"] > 64 or told["spool_mib"] > 64:
        found.append(f"{name}: files stay")
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="a few seconds, for the tests")
    p.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    p.add_argument("--parts", default="names,results,week,churn,live", help="which, by commas")
    p.add_argument("--trace", action="store_true", help="tell what allocated what is new")
    args = p.parse_args()
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for name in args.parts.split(","):
        if name == "live":
            figures[name] = live(40 if args.tiny else int(20_000 * args.scale))
            wrong += figures[name].pop("wrong")
            continue
        count = PARTS[name][2] if args.tiny else int(PARTS[name][1] * args.scale)
        if args.tiny:
            figures[name] = played(name, count, args.trace)
            continue
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            figures[name] = fresh.submit(played, name, count, args.trace).result()
        wrong += unbounded(name, figures[name])
    line("bounds", {"tiny": args.tiny, "scale": args.scale}, {**figures, "unbounded": wrong})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
