"""Measures the cost of starting as many workers as the largest degree has, on fewer cores.

An action that may be resized finds its present number of cores in `TANGRAM_CPUS` and its largest
degree in `TANGRAM_CPUS_MAX`; `make`, `pytest -n auto` and OpenMP start as many workers as the
latter says.

The figures are the time of the same work with N workers on c cores divided by its time with c
workers; medians of interleaved rounds. `make`: many small jobs. `split`: each worker does its part
and ends. `barrier`: workers wait for each other many times by spinning, as OpenMP does with active
waiting; this is the bad case. `sleep`: the same steps, but workers sleep while they wait.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from typing import Any

import common

from tangram_hpc import LocalCluster, Session

MAKEFILE = """JOBS := $(shell seq {jobs})
all: $(JOBS)
$(JOBS):
\t@awk 'BEGIN {{ while (i < {loops}) i++ }}'
.PHONY: all $(JOBS)
"""

WORKERS = r"""
import mmap, os, struct, sys, time
how, steps, loops = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
workers = int(os.environ["TANGRAM_CPUS_MAX"])
page = mmap.mmap(-1, 8 * workers)  # the step that each has reached

def behind(step):
    return any(struct.unpack_from("q", page, 8 * w)[0] < step for w in range(workers))

def work(me):
    for step in range(1, steps + 1):
        for _ in range(loops // workers // steps):
            pass
        if how != "split":
            struct.pack_into("q", page, 8 * me, step)
            while behind(step):
                if how == "sleep":
                    time.sleep(0.0002)

for me in range(workers):
    if os.fork() == 0:
        work(me)
        os._exit(0)
for _ in range(workers):
    os.wait()
"""


def run_s(session: Session, kind: str, workers: int, steps: int, loops: int) -> float:
    """Seconds of one action that starts so many workers."""
    command = (["make", "-s"] if kind == "make" else
               [sys.executable, "workers.py", kind, str(steps), str(loops)])
    future = session.exec(command, cpus=(1, workers) if workers > 1 else 1)
    future.result().check()
    assert future.details is not None
    return float(future.details.exec_s)


def measure(cores: int, rounds: int, steps: int, loops: int) -> dict[str, Any]:
    """Ratios by kind of work and number of workers."""
    counts = [cores, 2 * cores, 4 * cores, 8 * cores]
    files = {"workers.py": WORKERS, "Makefile": MAKEFILE.format(jobs=24, loops=loops // 24)}
    took: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as home, LocalCluster(cpus=cores, home=home) as cluster, \
            cluster.session(trusted=True, files=files) as session:
        for _ in range(rounds):
            for kind in ("make", "split", "sleep", "barrier"):
                for workers in counts:
                    took.setdefault((kind, workers), []).append(
                        run_s(session, kind, workers, steps, loops))
    middle = {of: statistics.median(times) for of, times in took.items()}
    return {kind: {f"{n // cores}x": round(middle[kind, n] / middle[kind, cores], 3)
                   for n in counts} for kind, first in middle if first == cores}


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    rounds, steps, loops = (1, 4, 400_000) if tiny else (5, 50, 20_000_000)
    figures = {f"{cores} cores": measure(cores, rounds, steps, loops) for cores in (1, 2)}
    common.line("oversubscribe", {"rounds": rounds, "steps": steps, "loops": loops}, figures)


if __name__ == "__main__":
    main()
