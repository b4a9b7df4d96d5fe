"""What it costs a broker that somebody watches: its CPU time for each answer to `tangram top`,
`queue` and `info`, and its CPU while a real `tangram top` asks once a second.

The job is a real one. 1,000 actions run (all but two are calls of an endpoint, which need no
processes) and 10,000 wait: half of them calls, half commands of twenty classes. The broker's CPU
without anybody watching is measured before, and is subtracted.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from bounds_live import _role

from tangram_hpc import LocalCluster
from tangram_hpc.resources.process_tree import descendants

CLASSES = 20
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used, in s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def share(pid: int, seconds: float) -> float:
    """The CPU that a process uses from now on, in percent of one core."""
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_s(pid) - before) / (time.monotonic() - began)


def answer_ms(cluster: LocalCluster, broker: int, what: str, times: int) -> float:
    """The broker's CPU time for one answer, in ms."""
    before = cpu_s(broker)
    for _ in range(times):
        cluster.ask(what)
    return round((cpu_s(broker) - before) / times * 1e3, 2)


async def load(cluster: LocalCluster, running: int, waiting: int) -> list[Any]:
    """Lets so many actions run and wait; returns what ends with the job."""
    endpoint = cluster.register_endpoint("search", concurrency=running - 2)
    calls = running - 2 + waiting // 2
    tasks = [asyncio.ensure_future(endpoint.slot(f"call {n % CLASSES}").__aenter__())
             for n in range(calls)]
    commands = [cluster.submit(["sleep", "3600"], trusted=True, name=f"tool {n % CLASSES}")
                for n in range(2 + waiting - waiting // 2)]
    while sum(cluster.ask("top")["reasons"].values()) < waiting or (
            cluster.ask("top")["running"] < running):
        await asyncio.sleep(0.2)
    return [*tasks, *commands]


def watched(broker: int, access: Path, seconds: float) -> float:
    """The broker's CPU while `tangram top` asks once a second, in percent of one core."""
    with subprocess.Popen([sys.executable, "-m", "tangram_hpc", "top", "-b", "-d", "1"],
                          stdout=subprocess.PIPE,
                          env=dict(os.environ, TANGRAM_ACCESS=str(access))) as top:
        assert top.stdout is not None
        top.stdout.readline()  # it has begun
        reader = subprocess.Popen(["cat"], stdin=top.stdout, stdout=subprocess.DEVNULL)
        found = share(broker, seconds)
        top.kill()
        reader.wait()
    return found


async def measure(tiny: bool) -> None:
    """Prints one line."""
    running, waiting = (20, 100) if tiny else (1000, 10_000)
    seconds, times = (1.0, 20) if tiny else (30.0, 200)
    with tempfile.TemporaryDirectory() as home, LocalCluster(cpus=2, home=Path(home)) as cluster:
        broker = next(p for p in descendants(os.getpid()) if _role(p) == "broker")
        pending = await load(cluster, running, waiting)
        await asyncio.sleep(0 if tiny else 3)
        idle = share(broker, seconds)
        figures = {f"{what}_answer_ms": answer_ms(cluster, broker, what, times)
                   for what in ("top", "queue", "info", "pending")}
        with_top = watched(broker, cluster.access, seconds)
        for one in pending:
            one.cancel()
        common.line("watch", {"running": running, "waiting": waiting, "seconds": seconds}, {
            **figures, "broker_idle_percent": round(idle, 2),
            "broker_with_top_percent": round(with_top, 2),
            "top_percent": round(with_top - idle, 2)})


if __name__ == "__main__":
    asyncio.run(measure(common.arguments(__doc__).tiny))
