"""Owns: HTTP to one engine that somebody else runs; the one door to httpx. Must not know what any
engine's answers mean.

Law: whatever the network does is a `ServiceDied` of one line. No line ever holds the token or what
a URL says of a user, an answer's text is cut and has no line breaks, and no proxy or netrc file of
the environment is asked: an engine is talked to directly. No connection is kept between requests:
servers close idle ones when they like, and that would look like a server that died.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import how_to_install
from ...ports import ServiceDied, ServiceRefused

CONNECT_S = 10.0
CONNECTIONS = 256  # at once to one engine; further requests wait
_CUT = 300  # characters of an answer that an error quotes
_MEMORY = re.compile(r"out of (device |gpu )?memory|OutOfMemory", re.IGNORECASE)


@dataclass(frozen=True)
class HttpResponse:
    """What came back. `text` has no token in it."""

    status: int
    text: str

    @property
    def ok(self) -> bool:
        """It was done."""
        return 200 <= self.status < 300

    @property
    def unwelcome(self) -> bool:
        """It wants another token, or any."""
        return self.status in (401, 403)

    @property
    def out_of_memory(self) -> bool:
        """It says that a device's memory is not enough."""
        return self.status == 507 or (self.status >= 400 and bool(_MEMORY.search(self.text)))

    def json(self) -> Any:
        """The text as JSON; None when it is none, or holds half a character (a lone surrogate),
        which nobody could be told of."""
        try:
            told = json.loads(self.text)
            if "\\ud" in self.text or "\\uD" in self.text:
                json.dumps(told, ensure_ascii=False).encode()
            return told
        except (ValueError, RecursionError):
            return None

    def line(self) -> str:
        """Its status and what it says of an error, in one line."""
        said = self.json()
        if isinstance(said, dict):
            said = said.get("error") or said.get("message") or said.get("detail") or said
        if isinstance(said, dict):
            said = said.get("message") or said
        words = " ".join((said if isinstance(said, str) else self.text).split())
        return f"{self.status}: {words[:_CUT]}" if words else str(self.status)


class Web:
    """One engine's address.

    Args:
        url: http://host:port, a path may follow.
        token: a bearer token, or empty.
        timeout_s: how long any answer may take.

    Raises:
        ServiceRefused: httpx is not installed.
    """

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        try:
            import httpx
        except ImportError:
            raise ServiceRefused("backend: engines behind HTTP need httpx; "
                                 f"{how_to_install('engines')}") from None
        parts = urlsplit(url)
        self.where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self.timeout_s = timeout_s
        self._url, self._token = url.rstrip("/"), token
        self._slow, self._broken = httpx.TimeoutException, (httpx.RequestError, httpx.InvalidURL)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0),
            trust_env=False, follow_redirects=False)

    async def get(self, path: str) -> HttpResponse:
        """Raises ServiceDied when no answer comes."""
        return await self._send("GET", path, None)

    async def post(self, path: str, body: Any = None) -> HttpResponse:
        """Sends `body` as JSON, or nothing. Raises ServiceDied when no answer comes."""
        return await self._send("POST", path, None if body is None else json.dumps(body))

    async def close(self) -> None:
        """Leaves no connection."""
        await self._client.aclose()

    async def _send(self, method: str, path: str, content: str | None) -> HttpResponse:
        try:
            answer = await self._client.request(
                method, self._url + path, content=content,
                headers={} if content is None else {"Content-Type": "application/json"})
        except self._slow:
            raise ServiceDied(f"{self.where}{path} did not answer within {self.timeout_s:g} s"
                              ) from None
        except self._broken as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise ServiceDied(f"{self.where} cannot be reached: {self._clean(why)[:_CUT]}"
                              ) from None
        return HttpResponse(answer.status_code, self._clean(answer.text))

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text
