"""The processes, the environment and the links of a live cluster, for tests that kill or cut them.

`LocalCluster` keeps these to itself on purpose, and only tests need them. So only this file reaches
into it.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tangram_hpc import BrokerUnreachable, Client, LocalCluster

DEADLINE_S = 60.0


def until(met: Callable[[], Any], what: str) -> Any:
    """Waits until a condition is met, and returns its value. `what` is the condition in words."""
    end = time.monotonic() + DEADLINE_S
    while not (found := met()):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)
    return found


def broker_of(cluster: LocalCluster) -> subprocess.Popen[bytes]:
    """The process of the cluster's broker."""
    return cluster._children[0]


def kill_broker(cluster: LocalCluster) -> None:
    """Kills the cluster's broker for good, as a lost node does: it is not started again."""
    cluster._restarts.count = 0
    broker = broker_of(cluster)
    broker.kill()
    broker.wait(DEADLINE_S)


def workers_of(cluster: LocalCluster) -> list[subprocess.Popen[bytes]]:
    """The processes of the cluster's workers, a new list."""
    return cluster._children[1:]


def processes_of(cluster: LocalCluster) -> list[subprocess.Popen[bytes]]:
    """The processes of the cluster's broker and workers, a new list; the broker comes first."""
    return [*cluster._children]


def kill_for_good(cluster: LocalCluster) -> None:
    """Kills the broker and the workers, which are not started again: as if all of a machine's
    processes were killed at once."""
    with cluster._spawning:
        for child in cluster._children:
            child.kill()
            child.wait(30)
        cluster._cut_lifeline()


def environ_of(cluster: LocalCluster) -> dict[str, str]:
    """The environment with which the cluster starts its processes. The cluster sees changes."""
    return cluster._environ


def start_worker(cluster: LocalCluster, name: str) -> subprocess.Popen[bytes]:
    """Starts one more worker of the cluster."""
    return cluster._spawn("worker", "--access", str(cluster.access), "--name", name)


def cut_link(client: Client) -> None:
    """Breaks the client's socket, as a failing network does. The client dials again by itself."""
    client._connection._channel._sock.shutdown(2)


@contextmanager
def disconnected(client: Client) -> Iterator[None]:
    """Cuts the client's connection and lets no new one succeed until the block ends."""
    connection, back = client._connection, threading.Event()
    dials = connection._dials

    def dial() -> Any:
        if not back.is_set():
            raise BrokerUnreachable("the network is down")
        return dials[0]()

    connection._dials = [dial]
    cut_link(client)
    try:
        yield
    finally:
        back.set()


def home_of(cluster: LocalCluster) -> Path:
    """The folder below which the cluster's jobs keep their files."""
    return Path(cluster._environ["TANGRAM_HOME"])
