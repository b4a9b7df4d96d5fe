"""What the encryption of TCP connections costs: the same work over TLS and over plain TCP.

Two brokers serve on this host's own address, one with `encryption = "tls"` and one with "off", and
a client of each is connected over TCP. Rounds alternate between the two, so that other work on the
machine hits both alike. Each round measures single round trips of a function, a burst of
functions, and commands that return 60 kB each, which travel inline. `connect_ms` is the time until
`tangram_hpc.connect` returns. The ratios are medians over the rounds, TLS over plain.

Without an address besides the loopback there is nothing to encrypt, and the bench says so.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.storage.access import read_access
from tangram_hpc.transport.socket.address import addresses

LARGE = ["head", "-c", "60000", "/dev/zero"]


def noop() -> None:
    """Nothing."""


def timed(work: Callable[[], Any]) -> float:
    """How long the work takes, in milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def burst(client: Any, count: int, *request: Any) -> None:
    """Submits the same work `count` times, and waits for all of it."""
    for future in [client.submit(*request) for _ in range(count)]:
        future.result(120)


def over_tcp(cluster: LocalCluster) -> tuple[Path, str]:
    """The access file and the TCP address, as `tangram_hpc.connect` takes them."""
    (address,) = (a for a in read_access(cluster.access).addresses if not a.startswith("unix:"))
    return cluster.access, f"tcp:{address.partition(':')[2].partition('#')[0]}"


def round_of(client: Any, trips: int, count: int) -> dict[str, float]:
    """One round of one client, milliseconds."""
    one = statistics.median(timed(lambda: client.submit(noop).result(60)) for _ in range(trips))
    return {"trip_ms": one, "burst_ms": timed(lambda: burst(client, count, noop)),
            "large_ms": timed(lambda: burst(client, count // 10, LARGE))}


def main() -> None:
    """Prints one JSON line."""
    tiny = common.arguments(__doc__).tiny
    rounds, trips, count = (2, 5, 20) if tiny else (15, 100, 2000)
    host = addresses("").listen
    params = {"rounds": rounds, "trips": trips, "burst": count, "large": count // 10}
    if host.startswith("127."):
        common.line("encryption", params, {"skipped": "this host has the loopback only"})
        return
    told: dict[str, list[dict[str, float]]] = {"tls": [], "off": []}
    with ExitStack() as stack:
        clients = {}
        for kind in told:
            home = stack.enter_context(tempfile.TemporaryDirectory())
            cluster = stack.enter_context(
                LocalCluster(cpus=1, home=home, bind=host, encryption=kind))
            access, address = over_tcp(cluster)
            began = time.perf_counter()
            clients[kind] = stack.enter_context(tangram_hpc.connect(access, address=address))
            params[f"connect_{kind}_ms"] = round((time.perf_counter() - began) * 1e3, 1)
            burst(clients[kind], trips, noop)
        for _ in range(rounds):
            for kind, client in clients.items():
                told[kind].append(round_of(client, trips, count))
    figures: dict[str, Any] = {kind: {key: round(statistics.median(r[key] for r in rows), 3)
                                      for key in rows[0]} for kind, rows in told.items()}
    for key in told["tls"][0]:
        ratios = sorted(a[key] / b[key] for a, b in zip(told["tls"], told["off"], strict=True))
        figures[f"{key[:-3]}_ratio"] = [round(ratios[round(q * (len(ratios) - 1))], 3)
                                        for q in (0.5, 0.0, 1.0)]
    common.line("encryption", params, figures)


if __name__ == "__main__":
    main()
