"""A fake search engine: a real HTTP server on loopback that enforces a limit of its own, and the
few lines of an HTTP client that its callers need.

It finds nothing (every answer says that it is fake). What it has of a real one is how it pushes
back: a token bucket, storms of 429 with or without Retry-After, and 503 for some requests that it
has carried out all the same. It counts what it carried out, by the caller's id.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Storm:
    """From `start_s` on every request gets a 429 for `long_s` seconds."""

    start_s: float
    long_s: float
    retry_after: str = ""


@dataclass
class Reply:
    """An answer, in the shape that HTTP libraries give it."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class FakeSearch:
    """The server; `async with` it. `rate` a second and `burst` are its limit."""

    rate: float = 50.0
    burst: float = 5.0
    latency_s: float = 0.005
    storms: list[Storm] = field(default_factory=list)
    failing: float = 0.0  # of the requests it carries out, those that get a 503
    seed: int = 1
    port: int = 0
    taken: list[float] = field(default_factory=list)  # when each request took a token
    carried: Counter[str] = field(default_factory=Counter)
    over: int = 0  # requests that found no token: the limit was broken
    stormed: int = 0  # 429 in storms
    failed: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    most_inside: int = 0
    _closed: dict[int, tuple[float, float]] = field(default_factory=dict)  # of each storm
    _level: float = 0.0
    _at: float = 0.0

    async def __aenter__(self) -> FakeSearch:
        self._rng = random.Random(self.seed)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._level, self._at, self._began = self.burst, time.monotonic(), 0.0
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readline()).decode()
        while (await reader.readline()).strip():
            pass
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        status, extra = await self._answer(request.split(" ")[1].rpartition("=")[2])
        self.inside -= 1
        body = b"fake: nothing was searched\n"
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{extra}"
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()
        writer.close()

    async def _answer(self, name: str) -> tuple[int, str]:
        now = time.monotonic()
        self._began = self._began or now
        for number, storm in enumerate(self.storms):
            if storm.start_s <= now - self._began < storm.start_s + storm.long_s:
                self.stormed += 1
                until = max(self._began + storm.start_s + storm.long_s,
                            now + float(storm.retry_after or 0))
                self._closed.setdefault(number, (now, until))
                return 429, f"Retry-After: {storm.retry_after}\r\n" if storm.retry_after else ""
        self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if self._level < 1:
            self.over += 1
            return 429, "Retry-After: 1\r\n"
        self._level -= 1
        self.taken.append(now)
        await asyncio.sleep(self.latency_s)
        self.carried[name] += 1
        if self._rng.random() < self.failing:
            self.failed[name] += 1
            return 503, ""
        return 200, ""

    # ---- what it saw -------------------------------------------------------------------------

    @property
    def span_s(self) -> float:
        """Seconds from the first request that it took to the last."""
        return self.taken[-1] - self.taken[0]

    @property
    def closed_s(self) -> float:
        """Seconds of them in which it wanted nobody: its storms, as it told its callers."""
        return sum(until - since for since, until in self._closed.values())

    def most_in(self, window_s: float) -> int:
        """The most requests that it took in any window of so many seconds."""
        most = first = 0
        for last, at in enumerate(self.taken):
            while self.taken[first] <= at - window_s:
                first += 1
            most = max(most, last - first + 1)
        return most


async def get(port: int, name: str) -> Reply:
    """One request for the id `name`, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET /search?id={name} HTTP/1.1\r\nHost: fake\r\n\r\n".encode())
        head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    finally:
        writer.close()
    lines = head.split("\r\n")
    if len(lines[0].split(" ")) < 2:
        raise ConnectionResetError("the connection ended without an answer")
    return Reply(int(lines[0].split(" ")[1]),
                 dict(line.split(": ", 1) for line in lines[1:]), text)
