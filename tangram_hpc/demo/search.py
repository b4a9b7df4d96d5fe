"""The mixed demo's search endpoint: a small HTTP server on loopback with a limit of its own, and
the call of it.

Law: it really searches (the problems' prompts, by the words they share with the query) and really
pushes back (a token bucket; 429 with Retry-After when it is empty). It counts what it served, by
the caller's id, so that a search that was lost or repeated shows.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

from .problems import Problem

SEARCH = "search"  # the endpoint's name
HITS = 3  # that an answer has at most
QUERY_CHARS = 80


@dataclass(frozen=True)
class SearchResponse:
    """An answer, in the shape in which `tangram_hpc.check_response` reads one."""

    status: int
    headers: dict[str, str]
    body: bytes


class Index:
    """Which words each problem's prompt has."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._words = {p.task_id: set(_words(f"{p.entry_point} {p.prompt}")) for p in problems}
        self._known = Counter(word for words in self._words.values() for word in words)

    def find(self, query: str) -> list[str]:
        """The ids of the problems that share the rarest words with it, best first."""
        asked = set(_words(query))
        scores = {name: sum(math.log(1 + len(self._words) / self._known[w]) for w in asked & words)
                  for name, words in self._words.items()}
        best = sorted(scores, key=lambda name: (-scores[name], name))
        return [name for name in best[:HITS] if scores[name] > 0]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def query_of(problem: Problem) -> str:
    """What a trajectory asks: the function's name and how its description begins. Of the problems
    that are known to this demo each finds itself so."""
    told = problem.prompt.partition('"""')[2] or problem.prompt
    return f"{problem.entry_point.replace('_', ' ')} {told[:QUERY_CHARS]}"


class SearchServer:
    """The server, on a thread of its own; `with` it. Read its counts when it has ended.

    Args:
        problems: what is searched.
        rate, burst: requests a second, and at once after a pause, that it takes.

    Attributes:
        served: how often each id was answered.
        throttled: requests that got a 429.
    """

    def __init__(self, problems: Sequence[Problem], rate: float, burst: float) -> None:
        self.served: Counter[str] = Counter()
        self.throttled = 0
        self.port = 0
        self._index, self._rate, self._burst = Index(problems), rate, burst
        self._level, self._at = burst, time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="search", daemon=True)

    def __enter__(self) -> SearchServer:
        self._thread.start()
        opening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = (await reader.readline()).decode(errors="replace").split(" ")
        while (await reader.readline()).strip():
            pass
        status, extra, body = self._answer(words[1] if len(words) > 1 else "")
        head = (f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
                f"{extra}\r\n")
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    def _answer(self, target: str) -> tuple[str, str, bytes]:
        asked = parse_qs(urlsplit(target).query)
        if "id" not in asked or "q" not in asked:
            return "400 Bad Request", "", b"{}"
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            self.throttled += 1
            return "429 Too Many Requests", "Retry-After: 1\r\n", b"{}"
        self._level -= 1
        self.served[asked["id"][0]] += 1
        return "200 OK", "", json.dumps({"hits": self._index.find(asked["q"][0])}).encode()


async def get(port: int, name: str, query: str) -> SearchResponse:
    """One request for the id `name`, over a connection of its own.

    Raises:
        ConnectionError: the endpoint cannot be reached, or the connection broke.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        target = f"/search?id={quote(name)}&q={quote(query)}"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    lines = head.decode().split("\r\n")
    words = lines[0].split(" ")
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionResetError("the connection ended without an answer")
    return SearchResponse(int(words[1]), dict(line.split(": ", 1) for line in lines[1:]), body)
