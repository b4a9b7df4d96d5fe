"""Round trip of one no-op action, one at a time: over the socket and over MPI, busy and idle.

Busy: back to back. After idle: the first action after 50 ms of silence, when adaptive waits
have backed off. Compared in the same run with ProcessPoolExecutor: no scheduler, no journal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common

import tangram_hpc
from tangram_hpc import LocalCluster

IDLE_S = 0.05


def noop() -> None:
    """Nothing."""


def measure(client: Any, busy: int, idle: int) -> dict[str, Any]:
    """Round trips through a client: figures of functions and of /bin/true."""
    def function() -> None:
        client.submit(noop).result()

    def program() -> None:
        client.submit(["/bin/true"]).result()

    common.timed(function, 20)
    common.timed(program, 20)
    cpu = time.process_time()
    time.sleep(1.0)
    idle_cpu = time.process_time() - cpu
    return {"function": common.percentiles(common.timed(function, busy)),
            "bin_true": common.percentiles(common.timed(program, busy)),
            "function_after_idle": common.percentiles(common.timed(function, idle, IDLE_S)),
            "client_idle_cpu_share": round(idle_cpu, 4)}


def over_mpi(access: Path, busy: int, idle: int) -> dict[str, Any]:
    """The same from a trainer rank through a gateway rank."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        environ = {**os.environ, "TANGRAM_ACCESS": str(access), "TANGRAM_GATEWAY": "1",
                   "TANGRAM_WORLD_SIZE": "2"}
        subprocess.run(
            [common.mpiexec(), "-n", "1", sys.executable, __file__, "--rank", str(busy), str(idle),
             out.name, ":", "-n", "1", sys.executable, "-m", "tangram_hpc", "gateway"],
            env=environ, check=True, timeout=300)
        told: dict[str, Any] = json.loads(Path(out.name).read_text())
    return told


def rank(busy: int, idle: int, out: str) -> None:
    """What the trainer rank runs."""
    with tangram_hpc.connect(name="bench") as client:
        assert client.via == "mpi"
        Path(out).write_text(json.dumps(measure(client, busy, idle)))


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    busy, idle = (60, 5) if tiny else (2000, 60)
    with tempfile.TemporaryDirectory() as home, LocalCluster(cpus=2, home=home) as cluster:
        sync = cluster.client.welcome.sync
        socket = measure(cluster, busy, idle)
        mpi = over_mpi(cluster.access, busy, idle)
    with ProcessPoolExecutor(2) as pool:
        pool.submit(noop).result()
        plain = common.percentiles(common.timed(lambda: pool.submit(noop).result(), busy))
    common.line("roundtrip", {"busy": busy, "idle": idle, "cpus": 2, "journal_sync": sync}, {
        "socket": socket, "mpi": mpi, "process_pool_function": plain,
        "mpi_over_socket": round(mpi["function"]["p50_ms"] / socket["function"]["p50_ms"], 2),
        "socket_over_process_pool": round(socket["function"]["p50_ms"] / plain["p50_ms"], 2)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
