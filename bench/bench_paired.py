"""Compares this checkout with another one: the same measurements in turn, as paired ratios.

    python bench/bench_paired.py --other ../parent/.venv/bin/python [--pairs 15]

A pair is two processes, one of each checkout, with a cluster of its own each. Everything is
measured in turn, once to warm up and ROUNDS times, so that the two halves of a pair lie seconds
apart and the drift of a shared machine falls on both. Which side begins alternates. Each pair has
processes of its own, because the ratio of the same two checkouts changes from one start to the next
more than within a start: 1.05 and 1.26 were seen. A pair's figure is the time that this
checkout took in all rounds over the time that the other took (above 1: slower); the line has the
median over the pairs and its 95 % interval (bootstrap, 10,000 resamples, a fixed seed). `cpu` is
the same for the CPU time of the side's whole process tree, which other work on the machine disturbs
less than it disturbs wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common

TICK = os.sysconf("SC_CLK_TCK")
SESSIONS = 64
RESAMPLES = 10_000
ROUNDS = 3


def noop() -> None:
    """Does nothing; of this file, so that it travels to the runners by value."""


def cpu_seconds() -> float:
    """CPU time of this process and of all below it, ended children that were reaped included."""
    rows: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # the process ended between the listing and the read
            continue
        rows[int(name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    total, wanted = 0, [os.getpid()]
    while wanted:
        pid = wanted.pop()
        total += rows.get(pid, (0, 0))[1]
        wanted += [child for child, (parent, _) in rows.items() if parent == pid]
    return total / TICK


def burst(submit: Callable[[], Any], count: int) -> None:
    """Submits `count` actions at once and waits for the last result."""
    for future in [submit() for _ in range(count)]:
        future.result()


def measurements(stack: ExitStack, tiny: bool) -> dict[str, Callable[[], object]]:
    """What is measured, by name, on one standing cluster."""
    from bench_sandbox import UsersCluster, Warm

    from tangram_hpc.errors import TangramError

    home = stack.enter_context(tempfile.TemporaryDirectory())
    cluster = stack.enter_context(UsersCluster(cpus=2, home=home))
    functions, programs, trips, sessions = (60, 8, 6, 2) if tiny else (8000, 800, 400, SESSIONS)
    plain = Warm(cluster, "process", sessions)
    stack.callback(plain.close)
    found: dict[str, Callable[[], object]] = {
        "functions": lambda: burst(lambda: cluster.submit(noop), functions),
        "programs": lambda: burst(lambda: cluster.submit(["/bin/true"]), programs // 2),
        "session_true": lambda: plain.busy(programs),
        "session_open": lambda: Warm(cluster, "process", sessions).close(),
        "function_trips": lambda: common.timed(lambda: cluster.submit(noop).result(), trips),
        "program_trips": lambda: common.timed(lambda: cluster.submit(["/bin/true"]).result(),
                                              trips // 2)}
    try:
        walled = Warm(cluster, "bwrap", sessions)
    except TangramError:
        return found
    stack.callback(walled.close)
    found["bwrap_true"] = lambda: walled.busy(programs)
    found["bwrap_open"] = lambda: Warm(cluster, "bwrap", sessions).close()
    return found


def serve(tiny: bool) -> None:
    """One side: reads a measurement's name from standard input, prints seconds and CPU seconds."""
    with ExitStack() as stack:
        found = measurements(stack, tiny)
        print(json.dumps(list(found)), flush=True)
        for line in sys.stdin:
            cpu, began = cpu_seconds(), time.perf_counter()
            found[line.strip()]()
            took = time.perf_counter() - began
            print(json.dumps([took, max(cpu_seconds() - cpu, 1 / TICK)]), flush=True)


class Side:
    """One checkout's process. It runs outside of both checkouts: Python would import the package
    from its current directory, whatever the interpreter has installed."""

    def __init__(self, python: str, tiny: bool) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--serve", *(["--tiny"] if tiny else [])],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tempfile.gettempdir())
        self.names: list[str] = self._read()

    def measure(self, name: str) -> tuple[float, float]:
        """Seconds and CPU seconds of one measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        took, cpu = self._read()
        return took, cpu

    def close(self) -> None:
        """Closes the side's standard input, which ends it, and waits for its end."""
        self._process.communicate(timeout=120)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended early")
        return json.loads(line)


def interval(ratios: list[float]) -> dict[str, float | list[float]]:
    """The median of some ratios, and its 95 % interval by bootstrap."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios)))
                     for _ in range(RESAMPLES))
    return {"median": round(statistics.median(ratios), 4),
            "interval95": [round(medians[int(RESAMPLES * share)], 4) for share in (0.025, 0.975)]}


def compare(other: str, pairs: int, tiny: bool, only: list[str]) -> None:
    """Runs the pairs and prints one line."""
    rows: dict[str, list[tuple[float, float]]] = {}
    rounds = 1 if tiny else ROUNDS
    for number in range(pairs):
        for name, ratios in one_pair(other, rounds, tiny, only).items():
            rows.setdefault(name, []).append(ratios)
        print(f"pair {number + 1} of {pairs}", file=sys.stderr, flush=True)
    common.line("paired", {"pairs": pairs, "rounds": rounds, "sessions": 2 if tiny else SESSIONS,
                           "cpus": 2, "other": other}, {
        name: {"wall": interval([wall for wall, _ in each]),
               "cpu": interval([cpu for _, cpu in each])} for name, each in rows.items()})


def one_pair(other: str, rounds: int, tiny: bool, only: list[str]
             ) -> dict[str, tuple[float, float]]:
    """Starts both sides, and returns the ratios of wall and of CPU time of each measurement."""
    sides = [Side(sys.executable, tiny), Side(other, tiny)]
    names = [name for name in sides[0].names if name in sides[1].names]
    if unknown := set(only).difference(names):
        raise SystemExit(f"--only: {', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    names = [name for name in names if not only or name in only]
    sums = {name: [[0.0, 0.0], [0.0, 0.0]] for name in names}
    for number in range(0 if tiny else -1, rounds):  # round -1 warms both sides up
        for name in names:
            for side in (0, 1) if number % 2 else (1, 0):
                took, cpu = sides[side].measure(name)
                if number >= 0:
                    sums[name][side][0] += took
                    sums[name][side][1] += cpu
    for each in sides:
        each.close()
    return {name: (mine[0] / others[0], mine[1] / others[1])
            for name, (mine, others) in sums.items()}


def main() -> None:
    """Runs one side's process with `--serve`, and the comparison without."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--other", default=sys.executable,
                   help="the Python interpreter of the other checkout; default: this one's")
    p.add_argument("--pairs", type=int, default=15, help="how many pairs are measured")
    p.add_argument("--only", nargs="*", default=[], metavar="NAME",
                   help="the measurements that are made; default: all")
    p.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.serve:
        serve(arguments.tiny)
    else:
        compare(arguments.other, 1 if arguments.tiny else arguments.pairs, arguments.tiny,
                arguments.only)


if __name__ == "__main__":
    main()
