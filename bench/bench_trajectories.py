"""Measures the system's share of the time of actions while very many trajectories run at once.

    python bench/bench_trajectories.py [--trajectories 1280] [--actions 10] [--think 3]

Each trajectory has a session of its own and runs one command after another. A command sleeps for a
second, so it needs no core, and the worker lends more CPUs than the machine has, one for each
trajectory: no action waits for a unit. Before each command the trajectory thinks for a time that is
drawn (exponential, mean `--think` seconds), as a model that generates would. What an action takes
beside its run time is then the system's: queue, set-up, start and return. The share is the sum of
that over the sum of action completion times, by the client's clock. Longer think times leave more
of the machine free: `machine_busy` is the part of its CPU time that this and all else used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from typing import Any

import common

from tangram_hpc import LocalCluster, Session
from tangram_hpc.client.future import Details

OPEN_AT_ONCE = 64
SEED = 1


def busy_and_all() -> tuple[int, int]:
    """Returns the CPU time of the machine that was used, and all of it, in ticks."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def opened(cluster: LocalCluster, count: int) -> list[Session]:
    """Opens so many sessions, OPEN_AT_ONCE at a time."""
    sessions: list[Session] = []
    while len(sessions) < count:
        more = [cluster.session(trusted=True)
                for _ in range(min(OPEN_AT_ONCE, count - len(sessions)))]
        for session in more:
            session.opened.result(120)
        sessions += more
    return sessions


async def trajectory(session: Session, thinks_s: list[float], run_s: float) -> list[Details]:
    """Runs a command after each think time."""
    ended = []
    for think_s in thinks_s:
        await asyncio.sleep(think_s)
        future = session.exec(["/bin/sleep", str(run_s)], name="sleep")
        (await future).check()
        assert future.details is not None
        ended.append(future.details)
    return ended


async def all_of(sessions: list[Session], actions: int, think_s: float, run_s: float
                 ) -> list[Details]:
    """Runs the trajectories, and returns how their actions were served. The first actions are left
    out: each is the first in its sandbox."""
    draw = random.Random(SEED)
    plans = [[draw.expovariate(1 / think_s) for _ in range(actions + 1)] for _ in sessions]
    ended = await asyncio.gather(*(
        trajectory(session, plan, run_s) for session, plan in zip(sessions, plans, strict=True)))
    return [details for each in ended for details in each[1:]]


def measure(trajectories: int, actions: int, think_s: float, run_s: float) -> dict[str, Any]:
    """Runs the trajectories on a cluster of their own, and returns the figures."""
    with tempfile.TemporaryDirectory() as home, \
            LocalCluster(cpus=trajectories, home=home) as cluster:
        sessions = opened(cluster, trajectories)
        began, (busy, every) = time.perf_counter(), busy_and_all()
        ended = asyncio.run(all_of(sessions, actions, think_s, run_s))
        took, (busy_then, every_then) = time.perf_counter() - began, busy_and_all()
        for session in sessions:
            session.close()
        for session in sessions:
            session.closed.result(120)
    act, run = sum(each.act_s for each in ended), sum(each.exec_s for each in ended)
    beside = [each.act_s - each.exec_s for each in ended]
    return {"system_share": round(1 - run / act, 5), "system": common.percentiles(beside),
            "queue_share": round(sum(each.queue_s for each in ended) / act, 5),
            "machine_busy": round((busy_then - busy) / max(1, every_then - every), 3),
            "actions": len(ended),
            "actions_per_s": round(trajectories * (actions + 1) / took, 1)}


def main() -> None:
    """Prints one line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    p.add_argument("--trajectories", type=int, default=1280, help="how many run at once")
    p.add_argument("--actions", type=int, default=10, help="measured actions of each")
    p.add_argument("--think", type=float, nargs="*", default=[1.0, 3.0, 9.0], metavar="S",
                   help="mean think times in seconds; one run for each")
    arguments = p.parse_args()
    if arguments.tiny:
        arguments.trajectories, arguments.actions, arguments.think = 8, 1, [0.05]
    run_s = 0.1 if arguments.tiny else 1.0
    common.allow_open_files()
    figures = {f"think {think_s:g} s": measure(
        arguments.trajectories, arguments.actions, think_s, run_s) for think_s in arguments.think}
    common.line("trajectories", {"trajectories": arguments.trajectories,
                                 "actions": arguments.actions, "run_s": run_s, "seed": SEED},
                figures | {"load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
