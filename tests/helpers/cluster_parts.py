"""The processes, the environment and the links of a live cluster, for tests that kill or cut them.

`LocalCluster` keeps these to itself on purpose, and only tests need them. So only this file reaches
into it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tangram_hpc import Client, LocalCluster


def broker_of(cluster: LocalCluster) -> subprocess.Popen[bytes]:
    """The process of the cluster's broker."""
    return cluster._children[0]


def workers_of(cluster: LocalCluster) -> list[subprocess.Popen[bytes]]:
    """The processes of the cluster's workers, a new list."""
    return cluster._children[1:]


def processes_of(cluster: LocalCluster) -> list[subprocess.Popen[bytes]]:
    """The processes of the cluster's broker and workers, a new list; the broker comes first."""
    return [*cluster._children]


def environ_of(cluster: LocalCluster) -> dict[str, str]:
    """The environment with which the cluster starts its processes. The cluster sees changes."""
    return cluster._environ


def start_worker(cluster: LocalCluster, name: str) -> subprocess.Popen[bytes]:
    """Starts one more worker of the cluster."""
    return cluster._spawn("worker", "--access", str(cluster.access), "--name", name)


def cut_link(client: Client) -> None:
    """Breaks the client's socket, as a failing network does. The client dials again by itself."""
    client._connection._channel._sock.shutdown(2)


def home_of(cluster: LocalCluster) -> Path:
    """The folder below which the cluster's jobs keep their files."""
    return Path(cluster._environ["TANGRAM_HOME"])
