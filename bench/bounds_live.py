"""The part `live` of `bench_bounds.py`: a steady soak of a `LocalCluster`.

Commands, functions, and sessions with commands and files run in turn. The resident memory of this
process, which is the client, of the broker, and of the workers with all processes beneath them is
sampled, each time when all of them rest: a session that was closed just now still has processes
of 20 MiB, and the sandbox that is prepared for the next session has none yet. The first half warms
everything up.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from growth import Growth, Sample, resident

from tangram_hpc import LocalCluster
from tangram_hpc.resources.process_tree import descendants

BYTES = 32.0  # resident bytes an action that a process may seem to grow by
NOISE = 4 << 20  # bytes by which the resident memory of a steady process may differ
LOOKS, APART_S = 3, 0.1  # so many looks, so far apart, must find the same processes at rest
REST_S = 30.0  # after so long a sample is taken of processes that do not rest


def live(count: int) -> dict[str, Any]:
    """Runs so many actions; returns slopes in bytes an action for each process."""
    with tempfile.TemporaryDirectory() as home, LocalCluster(cpus=2, home=Path(home)) as cluster:
        began = time.monotonic()

        def look() -> Sample:
            _wait_for_rest()
            return _resident_by_role()

        growth = Growth(look)
        every = max(20, count // 40)
        for done in range(0, count, 20):
            if done % every < 20:
                growth.sample(done)
            _twenty(cluster, done)
        growth.sample(count)
        figures: dict[str, Any] = {"actions": count, "seconds": round(time.monotonic() - began, 1)}
        wrong = []
        for who in ("rss", "broker", "worker", "sandboxes"):
            name = "client" if who == "rss" else who
            each = growth.second_half(who)
            figures[f"{name}_bytes_each"] = round(each, 1)
            figures[f"{name}_mib"] = round(growth.last(who) / 2**20, 1)
            if each > BYTES and each * count / 2 > NOISE:
                wrong.append(f"live: {name}: {each:.1f} bytes each")
        figures["client_blocks_each"] = round(growth.second_half("blocks"), 3)
        return {**figures, "wrong": wrong}


def _wait_for_rest() -> None:
    """Waits until nothing begins or ends beneath this process.

    The time alone does not tell, since on a busy machine a process that ends or begins may wait for
    a core for seconds. Such a process is runnable, and a process that rests sleeps.
    """
    before, same, deadline = set[int](), 0, time.monotonic() + REST_S
    while same < LOOKS and time.monotonic() < deadline:
        time.sleep(APART_S)
        found = set(descendants(os.getpid()))
        same = same + 1 if found == before and all(map(_sleeps, found)) else 0
        before = found


def _sleeps(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return False
    return stat.rpartition(") ")[2].startswith("S")


def _resident_by_role() -> Sample:
    """Resident bytes of all processes beneath this one."""
    found: Sample = dict.fromkeys(("broker", "worker", "sandboxes"), 0.0)
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            role = _role(pid)
            found[role] += resident(pid)
    return found


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    for role in ("broker", "worker"):
        if b"tangram_hpc" in words and role.encode() in words:
            return role
    return "sandboxes"


def _twenty(cluster: LocalCluster, first: int) -> None:
    """20 actions."""
    futures = [cluster.submit(abs, -n) for n in range(8)]
    futures += [cluster.submit(["true"], name=f"tool {first}") for _ in range(6)]
    futures.append(cluster.submit(len, bytes(100_000)))
    for future in futures:
        future.result(60)
    with cluster.session() as session:
        session.exec(["true"]).result(60)
        session.write("file", b"data").result(60)
        session.read("file").result(60)
    for future in [cluster.submit(abs, n) for n in range(2)]:
        future.result(60)
