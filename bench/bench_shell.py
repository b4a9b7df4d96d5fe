"""What a command in a shell that lives on costs, beside a fresh process and beside SWE-ReX.

`BACKEND_run_over_exec`: milliseconds of a no-op `shell.run` by those of a no-op `session.exec` of
the same backend, one at a time. `BACKEND_run_over_swerex`: by those of SWE-ReX's local bash
session. `BACKEND_open_over_exec`: the opening of a shell by a no-op `session.exec`. All are taken
in turn in one run; the median of the rounds' ratios counts. What is not installed is skipped and
says why (`pip install .[bench]`).
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import common
from bench_sandbox import SweRex, UsersCluster

from tangram_hpc import Session
from tangram_hpc.errors import TangramError

Round = Callable[[], float]  # one measurement: milliseconds of one command


def mean_ms(call: Callable[[], object], count: int) -> float:
    """Milliseconds of one call, the mean of `count`."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) * 1e3 / count


def of_session(session: Session, count: int) -> dict[str, Round]:
    """What is measured in one session."""
    shell = session.shell()
    assert shell.opened.result().ok
    other = session.shell  # a new one each time

    def opened() -> None:
        with other():
            pass

    return {"run": lambda: mean_ms(lambda: shell.run(":").result(), count),
            "open": lambda: mean_ms(opened, max(1, count // 20))}


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    rounds, count, rex_count = (1, 5, 1) if tiny else (5, 300, 10)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    measured: dict[str, Round] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(UsersCluster(cpus=2, home=home))
        for backend in ("process", "bwrap"):
            try:
                plain = stack.enter_context(cluster.session(backend=backend))
                session = stack.enter_context(cluster.session(backend=backend))
            except TangramError as error:
                skipped[backend] = str(error)
                continue
            measured[f"{backend}_exec"] = (
                lambda plain=plain: mean_ms(lambda: plain.exec(":").result(), count))
            for name, each in of_session(session, count).items():
                measured[f"{backend}_{name}"] = each
        if importlib.util.find_spec("swerex") is not None:
            rex = SweRex()
            stack.callback(rex.close)
            measured["swerex"] = lambda: 1e3 / rex.shell(rex_count)
        else:
            skipped["swerex"] = "swe-rex is not installed"
        took: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(-1, rounds):  # the first is to warm up
            for name, each in measured.items():
                ms = each()
                if number >= 0:
                    took[name].append(ms)
                print(name, round(ms, 3), file=sys.stderr, flush=True)
    figures: dict[str, object] = {f"{name}_ms": round(statistics.median(ms), 3)
                                  for name, ms in took.items()}
    for backend in ("process", "bwrap"):
        for ours, theirs in (("run", f"{backend}_exec"), ("open", f"{backend}_exec"),
                             ("run", "swerex")):
            if f"{backend}_{ours}" in took and theirs in took:
                name = f"{backend}_{ours}_over_{theirs.rpartition('_')[2]}"
                figures[name] = round(statistics.median(
                    a / b for a, b in zip(took[f"{backend}_{ours}"], took[theirs],
                                          strict=True)), 3)
    common.line("shell", {"commands": count, "rex_commands": rex_count, "rounds": rounds,
                          "cpus": 2}, {**figures, "skipped": skipped})


if __name__ == "__main__":
    main()
