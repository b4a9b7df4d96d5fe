"""The job of which tests export metrics: it has CPUs, stand-ins for GPUs, a service that was
called, an endpoint, and an action that has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tangram_hpc import LocalCluster


@contextmanager
def exported_job(home: Path, cpus: int) -> Iterator[LocalCluster]:
    """Runs the job 4711 until the block has ended."""
    with LocalCluster(cpus, mem_mib=2000, home=home, job="4711", devices="fake:2") as client:
        client.register_service("judge", {"backend": "fake", "wake_s": 0.0, "call_s": 0.0})
        client.register_endpoint("search", rate=50, burst=5)
        client.call("judge", "score", n=1).result(60)
        client.submit(["true"], trusted=True).result(60)
        yield client
