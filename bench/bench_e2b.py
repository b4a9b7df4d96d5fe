"""Commands over the E2B wire: one caller, then up to 250 at once, each with a sandbox of its own.

Each caller keeps a connection and sends `process.Process/Start` as the SDK does, for a shell line
that prints one word; an answer counts if its output and exit code are right. The published figures
beside ours are of another system on other hardware, and are not measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
import tempfile
import time
from typing import Any
from urllib.parse import urlsplit

import common

from tangram_hpc import LocalCluster

PUBLISHED = {"of": "Daytona, as verl#5796 tells it; published, not measured here",
             "one_p50_ms": 407, "at_250_per_s": 174}


class Caller:
    """One client with one sandbox and one connection."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._key = parts.hostname, parts.port, key
        self._calls = 0

    async def open(self) -> float:
        """Connects and makes the sandbox; returns the seconds that its creation took."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        began = time.perf_counter()
        body = json.dumps({"timeout": 3600}).encode()
        made = json.loads(await self._ask(
            "POST", "/v2/sandboxes", body, f"X-API-Key: {self._key}\r\n"
                                           "Content-Type: application/json\r\n"))
        self._own = (f"E2b-Sandbox-Id: {made['sandboxID']}\r\n"
                     f"X-Access-Token: {made['envdAccessToken']}\r\n")
        return time.perf_counter() - began

    async def run(self) -> float:
        """Runs one command; returns the seconds to its end.

        Raises:
            AssertionError: the answer is wrong.
        """
        self._calls += 1
        began = time.perf_counter()
        message = json.dumps({"process": {
            "cmd": "/bin/bash", "args": ["-l", "-c", f"echo {self._calls}"]}, "stdin": False})
        body = struct.pack(">BI", 0, len(message)) + message.encode()
        answer = await self._ask("POST", "/process.Process/Start", body, self._own +
                                 "Content-Type: application/connect+json\r\n")
        took, output, code = time.perf_counter() - began, b"", -1
        while answer:
            (size,) = struct.unpack_from(">xI", answer)
            event = json.loads(answer[5:5 + size]).get("event", {})
            answer = answer[5 + size:]
            output += base64.b64decode(event.get("data", {}).get("stdout", ""))
            code = event["end"].get("exitCode", 0) if "end" in event else code
        assert (output, code) == (b"%d\n" % self._calls, 0), (output, code)
        return took

    async def close(self) -> None:
        """Closes the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    async def _ask(self, method: str, path: str, body: bytes, headers: str) -> bytes:
        self._writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}"
                           f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 20" in head[:13], head
        if b"transfer-encoding: chunked" not in head:
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return await self._reader.readexactly(size)
        parts = []
        while size := int(await self._reader.readline(), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return b"".join(parts)


async def measure(url: str, key: str, callers: int, calls: int) -> dict[str, Any]:
    """Returns the measurements of several callers at once, each of which runs its commands one
    after the other."""
    all_callers = [Caller(url, key) for _ in range(callers)]
    began = time.perf_counter()
    creations = await asyncio.gather(*[each.open() for each in all_callers])
    created_s = time.perf_counter() - began
    await asyncio.gather(*[each.run() for each in all_callers])  # the first start of each sandbox

    async def run(caller: Caller) -> list[float]:
        return [await caller.run() for _ in range(calls)]

    began = time.perf_counter()
    took = [each for some in await asyncio.gather(*map(run, all_callers)) for each in some]
    seconds = time.perf_counter() - began
    await asyncio.gather(*[each.close() for each in all_callers])
    return {"calls": len(took), "per_s": round(len(took) / seconds, 1),
            **common.percentiles(took),
            "create": {"all_s": round(created_s, 3), **common.percentiles(creations)}}


def main() -> None:
    """Runs the benchmark and prints its result as one line of JSON."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="some seconds, for the tests")
    p.add_argument("--callers", type=int, nargs="+", default=[1, 16, 64, 250],
                   help="how many callers at once, one measurement each")
    p.add_argument("--calls", type=int, default=20, help="commands of each caller")
    args = p.parse_args()
    crowds, calls = ([1, 4], 3) if args.tiny else (args.callers, args.calls)
    common.allow_open_files()
    figures: dict[str, Any] = {"published": PUBLISHED}
    for callers in crowds:
        with tempfile.TemporaryDirectory() as home, \
                LocalCluster(cpus=2, home=home, http=True) as cluster:
            assert cluster.http is not None
            figures[f"callers_{callers}"] = asyncio.run(measure(
                cluster.http.url, cluster.http.key, callers,
                calls * (5 if callers == 1 else 1)))
    common.line("e2b", {"callers": crowds, "calls_each": calls}, figures)


if __name__ == "__main__":
    main()
