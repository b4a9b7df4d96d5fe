"""The process of one peer in one round: starts it, measures what it is told, and stops it.

    python bench/peers/serve.py PEER CORES TINY MEASUREMENT ...

A JSON line for each measurement goes to standard output, the first when the first piece of work has
ended; what the peer itself prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapter import Peer
from peers import PEERS
from work import mixed_tasks

SILENCE_S = 0.02  # before each idle round trip
IDLE_S, IDLE_MAX, MIXED = 2.5, 100, 400
TINY_BURST_S, TINY_IDLE_MAX, TINY_MIXED = 0.02, 3, 10
FIRST_BURST, LAST_BURST, WARM_BURSTS = 16, 200_000, 2


def rate(burst: Callable[[int], float | None], burst_s: float) -> float:
    """Pieces of work per second of the first burst that takes at least `burst_s`. Each burst is two
    to eight times as long as the one before; the first ones, in which workers start, never
    count."""
    for _ in range(WARM_BURSTS):
        burst(FIRST_BURST)
    count = FIRST_BURST
    while True:
        began = time.perf_counter()
        told_s = burst(count)
        took_s = told_s or time.perf_counter() - began
        if took_s >= burst_s or count >= LAST_BURST:
            return count / took_s
        count = min(LAST_BURST, count * 8, max(count * 2, round(count / took_s * burst_s * 1.5)))


def idle(peer: Peer, tiny: bool) -> list[float]:
    """Seconds of single round trips, each after `SILENCE_S` in which nothing was asked."""
    took: list[float] = []
    until = time.perf_counter() + IDLE_S
    peer.one()
    while len(took) < (TINY_IDLE_MAX if tiny else IDLE_MAX) and (
            time.perf_counter() < until or not took):
        time.sleep(SILENCE_S)
        began = time.perf_counter()
        peer.one()
        took.append(time.perf_counter() - began)
    return took


def measure(peer: Peer, what: str, tiny: bool) -> Any:
    """One measurement: a rate, or a list of seconds."""
    if what == "idle":
        return idle(peer, tiny)
    if what.startswith("mixed"):
        seed = int(what.partition(":")[2])
        return peer.mixed(mixed_tasks(seed, TINY_MIXED if tiny else MIXED, peer.cores))
    return rate(getattr(peer, what), TINY_BURST_S if tiny else peer.burst_s)


def main() -> None:
    """See the module's text."""
    name, cores, tiny, *measurements = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="peer", ignore_cleanup_errors=True) as folder:
        peer = PEERS[name](int(cores), Path(folder))
        peer.start()
        peer.first()
        print(json.dumps({"what": "cold"}), file=answers, flush=True)
        for what in measurements:
            value = measure(peer, what, tiny == "tiny")
            print(json.dumps({"what": what, "value": value}), file=answers, flush=True)
        os.chdir("/")
        peer.stop()


if __name__ == "__main__":
    main()
