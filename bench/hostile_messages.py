"""A million hostile messages against a live broker and HTTP server, while a client works.

There are five kinds of senders (`hostile_senders.py`), each in a process of its own, or with
`--tiny` in a thread: a client and a worker that have their keys and say anything, peers without a
key, guesses of a shared session's token, and HTTP requests with and without the key. Meanwhile an
honest client counts its round trips, which are compared with those of the same client alone, before
and after. What a false broker could say to a worker is not sent: workers believe their broker.

The status is 1 if the broker, its worker or the HTTP server did not live through it, if somebody
got in without a right, or if fewer messages were sent than were asked for. The broker may never
have been started again: its process is the same one at the end. The figures have p50 and p99 of the
honest client's round trips alone, in the flood and after it.

    python bench/hostile_messages.py [--count 1000000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import hostile_senders as senders
from hostile_pool import KINDS, drawn

from tangram_hpc import LocalCluster
from tangram_hpc.storage.access import read_access

# how the messages are divided
SHARES = {"clients": 0.6, "workers": 0.15, "strangers": 0.05, "tokens": 0.15, "requests": 0.05}
_PAUSE_S = 0.01  # between two round trips of the honest client


def trip(cluster: LocalCluster) -> None:
    """One round trip of an action through broker and worker."""
    assert cluster.submit(pow, 2, 5).result(300) == 32


def start(pool: Executor, cluster: LocalCluster, count: int) -> dict[str, Future[Any]]:
    """Starts all senders."""
    assert cluster.http is not None
    access, http = cluster.access, cluster.http
    said = {name: drawn(name, min(3000, count // 10)) for name in KINDS}
    sizes = {name: max(40, int(count * share)) for name, share in SHARES.items()}
    work: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "clients": (senders.clients, (access, said["clients"])),
        "workers": (senders.workers, (access, said["workers"])),
        "strangers": (senders.strangers, (access,)), "tokens": (senders.tokens, (access,)),
        "requests": (senders.requests, (http.url, http.key))}
    return {name: pool.submit(call, *args, sizes[name], number)
            for number, (name, (call, args)) in enumerate(work.items())}


def workers_of(cluster: LocalCluster) -> list[str]:
    """The nodes that lend, but for that of the hostile worker."""
    return [f"{node['name']} {node['node']}" for node in cluster.ask("nodes")["nodes"]
            if node["state"] == "UP" and node["name"] != "hostile"]


def served(cluster: LocalCluster) -> bool:
    """Whether the HTTP server answers somebody with its key."""
    assert cluster.http is not None
    ask = urllib.request.Request(f"{cluster.http.url}/v1/ping",
                                 headers={"X-API-Key": cluster.http.key})
    with urllib.request.urlopen(ask, timeout=60) as answer:
        return bool(answer.status == 200)


def measure(count: int, tiny: bool) -> int:
    """Prints one line; returns the exit status."""
    spawn = multiprocessing.get_context("spawn")
    senders_of = ThreadPoolExecutor(len(SHARES)) if tiny else ProcessPoolExecutor(
        len(SHARES), spawn)
    with tempfile.TemporaryDirectory(prefix="tangram-hostile-") as home, LocalCluster(
            cpus=2, home=Path(home) / "h", http=True, bind="127.0.0.1") as cluster, \
            senders_of as pool:
        os.chdir(home)  # what a message names is made here, if anywhere
        broker, workers = read_access(cluster.access).pid, workers_of(cluster)
        with cluster.session(trusted=True, shared=True, name="shared") as session:
            session.exec("true").result(60)
            alone = common.timed(lambda: trip(cluster), 20 if tiny else 500, _PAUSE_S)
            began, took = time.monotonic(), list[float]()
            running = start(pool, cluster, count)
            while not all(future.done() for future in running.values()):
                took += common.timed(lambda: trip(cluster), 1, _PAUSE_S)
            seconds = time.monotonic() - began
            sent = {key: n for future in running.values() for key, n in future.result().items()}
            usable = session.exec("echo on").result(60).text == "on\n"
        after = common.timed(lambda: trip(cluster), 20 if tiny else 500, _PAUSE_S)
        alive = {"broker": read_access(cluster.access).pid == broker, "session": usable,
                 "worker": workers_of(cluster) == workers, "http": served(cluster)}
        messages = sum(sent[kind] for kind in ("client", "worker", "stranger", "token", "http"))
        common.line("hostile_messages", {"count": count}, {
            "messages": messages, "seconds": round(seconds, 1), **sent, "alive": alive,
            "alone": common.percentiles(alone), "flood": common.percentiles(took),
            "flood_worst_ms": round(max(took) * 1e3, 1), "flood_trips": len(took),
            "after": common.percentiles(after)})
        good = all(alive.values()) and not sent["stranger_let_in"] and not sent["token_let_in"]
        return 0 if good and messages >= count else 1


def main() -> int:
    """Runs the bench; returns the exit status."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="some hundred messages")
    p.add_argument("--count", type=int, default=1_000_000, help="messages in all")
    args = p.parse_args()
    return measure(600 if args.tiny else args.count, args.tiny)


if __name__ == "__main__":
    sys.exit(main())
