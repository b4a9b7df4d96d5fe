"""Measures how a program of two busy processes speeds up when the scheduler gives it a second core.

The same program is also moved by `taskset`, outside of any sandbox, and the figures are the ratios
of both gains; the move from two cores to one is measured in the same way. Rounds are interleaved,
and the figures are medians, for each isolation backend that works here, with the best enforcement
and with affinity alone. A ratio of 1 means that a resize gains what the hardware can give.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import common
from resize import bare, gain, held_ns, through_session

from tangram_hpc import LocalCluster
from tangram_hpc.resources.cpu import affinity

MOVES = {"grow": (1, 2), "shrink": (2, 1)}


def measure(cluster: LocalCluster, backend: str, rounds: int, span_s: float) -> dict[str, Any]:
    """Medians of both moves through one backend."""
    figures: dict[str, Any] = {}
    cores = affinity.usable()[:2]
    for move, (first, then) in MOVES.items():
        alone, through, added_up = [], [], []
        for _ in range(rounds):
            alone.append(gain(bare(first, then, cores, span_s)))
            phases, pair = through_session(cluster.client, first, then, span_s, backend=backend)
            assert [p["units"] for p in phases] == [first, then]
            through.append(gain(phases))
            added_up.append(held_ns(pair) / 1e9)
            assert pair.details is not None
            figures["isolation"] = pair.details.isolation
            figures["enforcement"] = pair.details.enforcement
        figures[move] = {
            "bare_gain": round(statistics.median(alone), 3),
            "session_gain": round(statistics.median(through), 3),
            "session_over_bare": round(statistics.median(through) / statistics.median(alone), 3),
            "held_core_s": round(statistics.median(added_up), 3)}
    return figures


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    rounds, span_s = (1, 0.15) if tiny else (7, 0.8)
    figures: dict[str, Any] = {}
    if len(affinity.usable()) < 2:
        figures["left_out"] = "one core only: nothing can be moved"
    for enforcement in ("", "affinity") if not figures else ():
        with tempfile.TemporaryDirectory() as home, LocalCluster(
                cpus=2, home=home, enforcement=enforcement) as cluster:
            offers = cluster.ask("nodes")["nodes"][0]["untrusted"]
            for backend in [b for b in ("process", "bwrap") if b in offers]:
                figures[f"{backend}/{enforcement or 'best'}"] = measure(
                    cluster, backend, rounds, span_s)
    common.line("resize", {"rounds": rounds, "span_s": span_s, "cpus": 2}, figures)


if __name__ == "__main__":
    main()
