"""What keeping outputs costs: commands in sessions, with `logs_mib` and without, in turn.

Two clusters stand beside each other, and bursts alternate between them, so that the drift of a
shared machine falls on both. A figure is the time with kept outputs over the time without (above 1:
slower): the median over the pairs; `cpu` is the same for the CPU time of the whole process tree.
`quick` commands print a line and are over at once; `chatty` ones print 64 KiB in small pieces.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
from bench_paired import cpu_seconds

from tangram_hpc import LocalCluster

COMMANDS = {"quick": ["echo", "a line of output"],
            "chatty": ["sh", "-c", "i=0; while [ $i -lt 1024 ]; do echo "
                       "0123456789012345678901234567890123456789012345678901234567890; "
                       "i=$((i + 1)); done"]}


def burst(sessions: list[Any], argv: list[str], count: int) -> tuple[float, float]:
    """Wall and CPU seconds of so many commands."""
    began, used = time.perf_counter(), cpu_seconds()
    for future in [sessions[n % len(sessions)].exec(argv) for n in range(count)]:
        future.result(120)
    return time.perf_counter() - began, cpu_seconds() - used


def main() -> None:
    """Runs the pairs, and prints the line."""
    tiny = common.arguments(__doc__).tiny
    pairs, counts = (2, {"quick": 20, "chatty": 4}) if tiny else (
        15, {"quick": 2000, "chatty": 200})
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        sides = []
        for name, mib in (("on", 64), ("off", 0)):
            cluster = stack.enter_context(LocalCluster(2, home=Path(folder) / name, job=name,
                                                       logs_mib=mib))
            sides.append([stack.enter_context(cluster.session()) for _ in range(2 if tiny else 8)])
        for name, argv in COMMANDS.items():
            for side in sides:
                burst(side, argv, counts[name] // 4)  # learned, and warm
            walls, cpus = [], []
            for pair in range(pairs):
                order = (0, 1) if pair % 2 else (1, 0)
                took = {side: burst(sides[side], argv, counts[name]) for side in order}
                walls.append(took[0][0] / took[1][0])
                cpus.append(took[0][1] / max(took[1][1], 1e-9))
            figures[name] = {"wall": round(statistics.median(walls), 3),
                             "cpu": round(statistics.median(cpus), 3)}
        kept = sum(path.stat().st_size for path in Path(folder).rglob("outputs/*/*.out"))
        assert kept > 64, "nothing was kept"
        assert not list(Path(folder).glob("off/jobs/*/outputs"))
        figures["kept_mib"] = round(kept / 2**20, 2)
    common.line("logs", {"pairs": pairs, **counts}, figures)


if __name__ == "__main__":
    main()
