"""Measures an endpoint of 50 requests a second that pushes back: which fraction of its limit is
used, and whether requests exceed the limit, are lost or are wrongly repeated.

The endpoint is a fake one (`tests/helpers/fake_search.py`): a real HTTP server on loopback with a
token bucket of its own, which now and then answers 429 to everybody for a while, with and without
Retry-After, and 503 to some requests that it has carried out. Half of the requests are declared
idempotent. `share_of_limit` counts the times in which it answers 429 as lost, `share_while_open`
leaves them out.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from helpers.fake_search import FakeSearch, Storm, get

from tangram_hpc import LocalCluster, Transient, check_response

RATE = 50.0


async def drive(cluster: Any, server: FakeSearch, count: int, jitter_ms: float) -> dict[str, Any]:
    """Submits all requests at once; returns what their callers saw and what the server saw."""
    search = cluster.register_endpoint("search", concurrency=32, rate=RATE,
                                       burst=server.burst, jitter_ms=jitter_ms)

    async def one(number: int) -> bool:
        """Returns whether the request was served, or ended with a 503 that must not be repeated."""
        async def attempt() -> str:
            return check_response(await get(server.port, str(number))).text
        try:
            await search.request(attempt, timeout=300, idempotent=number % 2 == 0, cost=1)
        except Transient:
            return False
        return True

    served = await asyncio.gather(*map(one, range(count)))
    carried = server.carried
    return {
        "share_of_limit": round((len(server.taken) - 1) / (RATE * server.span_s), 4),
        "share_while_open": round(
            (len(server.taken) - 1) / (RATE * (server.span_s - server.closed_s)), 4),
        "over_the_limit": server.over, "most_in_1_s": server.most_in(1.0),
        "limit_of_1_s": int(RATE + server.burst),
        "lost": sum(carried[str(n)] == 0 for n in range(count)),
        "repeated": sum(carried[str(n)] > 1 for n in range(1, count, 2)),
        "repeated_idempotent": sum(carried[str(n)] > 1 for n in range(0, count, 2)),
        "told_failed": served.count(False),
        "said_failed_but_not": sum(not ok and not server.failed[str(n)]
                                   for n, ok in enumerate(served)),
        "answers_429": server.stormed + server.over, "answers_503": server.failed.total(),
        "seconds": round(server.span_s, 2), "closed_s": round(server.closed_s, 2)}


async def run(cluster: Any, count: int, storms: list[Storm], burst: float,
              jitter_ms: float) -> dict[str, Any]:
    """Starts one server, drives it and returns the measurements."""
    async with FakeSearch(RATE, burst, storms=storms, failing=0.01) as server:
        return await drive(cluster, server, count, jitter_ms)


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    count = 150 if tiny else 6000
    # larger tolerances, as `--tiny` runs beside other tests
    burst, jitter_ms = (20.0, 300.0) if tiny else (10.0, 100.0)
    storms = [Storm(1.0, 0.2, "0.5")] if tiny else [
        Storm(20.0, 0.3, "1"), Storm(55.0, 0.3), Storm(90.0, 0.3, "1")]
    with tempfile.TemporaryDirectory() as home, LocalCluster(cpus=1, home=home) as cluster:
        figures = asyncio.run(run(cluster, count, storms, burst, jitter_ms))
    common.line("endpoint", {"requests": count, "rate": RATE, "burst": burst,
                             "jitter_ms": jitter_ms, "concurrency": 32, "storms": len(storms)},
                figures)


if __name__ == "__main__":
    main()
