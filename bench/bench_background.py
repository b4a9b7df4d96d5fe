"""What a detached job costs that is polled, under each `background=`, against the same job in the
foreground; and what background processes cost that only wait.

The job uses so much CPU time in a session, is started with `nohup ... &` and asked for with a short
command at each poll. `run_over_foreground` and its like are ratios of one run, at the same load.
`gave_up` says that a job did not end in `patience_s`. `waiting_pct` is the CPU time of the inits of
sessions with a process that sleeps, in percent of one core for each session; without background
processes an init sleeps until it is needed.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import common

from tangram_hpc import LocalCluster
from tangram_hpc.client.session import Session
from tangram_hpc.resources import process_tree

BURN = "import sys, time\nwhile time.process_time() < float(sys.argv[1]):\n    pass\n"


def foreground_s(session: Session, cpu_s: float) -> float:
    """How long the job takes as an action of its own."""
    began = time.perf_counter()
    session.exec(["python3", "burn.py", str(cpu_s)]).result().check()
    return time.perf_counter() - began


def detached_s(session: Session, cpu_s: float, poll_s: float, patience_s: float) -> float:
    """How long it takes detached, until a poll finds it done."""
    began = time.perf_counter()
    session.exec("rm -f done; nohup sh -c "
                 f"'python3 burn.py {cpu_s}; touch done' >/dev/null 2>&1 &").result().check()
    while session.exec(["test", "-e", "done"]).result().exit_code:
        if time.perf_counter() - began > patience_s:
            break
        time.sleep(poll_s)
    return time.perf_counter() - began


def polled(cluster: LocalCluster, rounds: int, cpu_s: float, poll_s: float,
           patience_s: float) -> dict[str, Any]:
    """The figures of the job under each `background=`, in turn."""
    took: dict[str, list[float]] = {}
    for _ in range(rounds):
        for how in ("stop", "share", "run"):
            with cluster.client.session(background=how, trusted=True,
                                        files={"burn.py": BURN}) as session:
                foreground_s(session, 0)  # so that what it reads is in memory
                took.setdefault("foreground", []).append(foreground_s(session, cpu_s))
                took.setdefault(how, []).append(detached_s(session, cpu_s, poll_s, patience_s))
    medians = {how: statistics.median(times) for how, times in took.items()}
    figures: dict[str, Any] = {f"{how}_s": round(s, 3) for how, s in medians.items()}
    for how in ("stop", "share", "run"):
        figures[f"{how}_over_foreground"] = round(medians[how] / medians["foreground"], 2)
    figures["gave_up"] = sorted(how for how, times in took.items()
                                if how != "foreground" and max(times) > patience_s)
    return figures


def waiting_pct(cluster: LocalCluster, sessions: int, seconds: float, busy: bool) -> float:
    """What the inits of sessions use between their actions, in percent of one core for each."""
    before = set(process_tree.descendants(os.getpid()))
    opened = [cluster.client.session(background="run", trusted=True) for _ in range(sessions)]
    line = "(sleep 1000 >/dev/null 2>&1 &)" if busy else "true"
    for future in [session.exec(line) for session in opened]:
        future.result().check()
    time.sleep(1.0)  # the first samples come at short intervals
    mine = [pid for pid in process_tree.descendants(os.getpid()) if pid not in before]
    began, used = time.perf_counter(), sum(map(process_tree.cpu_ns, mine))
    time.sleep(seconds)
    spent = sum(map(process_tree.cpu_ns, mine)) - used
    took = time.perf_counter() - began
    for session in opened:
        session.close()
        session.closed.result(60)
    return round(spent / 1e9 / took / sessions * 100, 3)


def main(tiny: bool) -> None:
    """Prints the line."""
    rounds, cpu_s, poll_s, patience_s = (1, 0.05, 0.1, 2.0) if tiny else (3, 0.3, 1.0, 30.0)
    sessions, seconds = (2, 0.5) if tiny else (20, 10.0)
    with LocalCluster(cpus=2) as cluster:
        figures = polled(cluster, rounds, cpu_s, poll_s, patience_s)
        figures["waiting_pct"] = waiting_pct(cluster, sessions, seconds, True)
        figures["without_pct"] = waiting_pct(cluster, sessions, seconds, False)
    common.line("background", {"rounds": rounds, "cpu_s": cpu_s, "poll_s": poll_s,
                               "patience_s": patience_s, "sessions": sessions,
                               "seconds": seconds}, figures)


if __name__ == "__main__":
    main(common.arguments(__doc__).tiny)
