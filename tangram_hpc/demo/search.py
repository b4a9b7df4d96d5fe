"""The search endpoint of the mixed demo: a small HTTP server on loopback, and its client call.

The server searches the problems' prompts by the words that they share with the query, and has a
rate limit: a token bucket that answers 429 with Retry-After when it is empty. It counts its answers
by the caller's id, so that a lost or repeated search can be seen.
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
HITS = 3  # largest number of problems in an answer
QUERY_CHARS = 80


@dataclass(frozen=True)
class SearchResponse:
    """An HTTP response with the attributes that `tangram_hpc.check_response` reads."""

    status: int
    headers: dict[str, str]
    body: bytes


class Index:
    """The words of each problem's prompt."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._words = {p.task_id: set(_words(f"{p.entry_point} {p.prompt}")) for p in problems}
        self._known = Counter(word for words in self._words.values() for word in words)

    def find(self, query: str) -> list[str]:
        """Returns the ids of the problems that share the rarest words with the query, best first.
        """
        wanted = set(_words(query))
        scores = {name: sum(math.log(1 + len(self._words) / self._known[w]) for w in wanted & words)
                  for name, words in self._words.items()}
        best = sorted(scores, key=lambda name: (-scores[name], name))
        return [name for name in best[:HITS] if scores[name] > 0]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def query_of(problem: Problem) -> str:
    """Returns a trajectory's query: the function's name and the beginning of its description.

    The query of each problem of this demo finds that problem.
    """
    description = problem.prompt.partition('"""')[2] or problem.prompt
    return f"{problem.entry_point.replace('_', ' ')} {description[:QUERY_CHARS]}"


class SearchServer:
    """The search server, on a thread of its own; use it with `with`, and read its counts
    afterwards.

    Args:
        problems: The problems to search.
        rate: Requests a second that the server answers.
        burst: Requests that it answers at once after a pause.

    Attributes:
        served: How often each id was answered.
        throttled: Requests that got a 429.
        port: TCP port on loopback; 0 before the server has started.
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
        parts = (await reader.readline()).decode(errors="replace").split(" ")
        while (await reader.readline()).strip():
            pass
        status, extra, body = self._answer(parts[1] if len(parts) > 1 else "")
        head = (f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
                f"{extra}\r\n")
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    def _answer(self, target: str) -> tuple[str, str, bytes]:
        query = parse_qs(urlsplit(target).query)
        if "id" not in query or "q" not in query:
            return "400 Bad Request", "", b"{}"
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            self.throttled += 1
            return "429 Too Many Requests", "Retry-After: 1\r\n", b"{}"
        self._level -= 1
        self.served[query["id"][0]] += 1
        return "200 OK", "", json.dumps({"hits": self._index.find(query["q"][0])}).encode()


async def get(port: int, name: str, query: str) -> SearchResponse:
    """Sends one search for the id `name`, over a connection of its own.

    Raises:
        ConnectionError: The server cannot be reached, or closed the connection without an answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        target = f"/search?id={quote(name)}&q={quote(query)}"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    lines = head.decode().split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) < 2 or not parts[1].isdigit():
        raise ConnectionResetError("the search server closed the connection without an answer")
    return SearchResponse(int(parts[1]), dict(line.split(": ", 1) for line in lines[1:]), body)
