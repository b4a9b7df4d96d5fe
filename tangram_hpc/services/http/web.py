"""HTTP to one engine that somebody else runs; the only importer of httpx.

Every failure of the network becomes a `ServiceDied` of one line. The module of each engine decides
what the engine's answers mean.

Invariants: no message ever contains the token or the user part of a URL. The text of an answer is
cut and has no line breaks. However slowly or endlessly an engine answers, a request ends in time
and keeps no more than `BODY_MAX` bytes. An engine is spoken to directly: no proxy or netrc file of
the environment is used; the certificates that SSL_CERT_FILE names are. No connection is kept
between requests, because servers close idle ones when they like, and that would look like a server
that died.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import how_to_install
from ...ports import ServiceDied, ServiceRefused

CONNECT_S = 10.0
CONNECTIONS = 256  # connections to one engine at a time; further requests wait
BODY_MAX = 256 << 20  # bytes of one answer, as of one message to the broker
_CUT = 300  # characters of an answer that an error quotes
_MEMORY = re.compile(r"out of (device |gpu )?memory|OutOfMemory", re.IGNORECASE)


@dataclass(frozen=True)
class HttpResponse:
    """An answer of the server.

    Attributes:
        status: The HTTP status.
        text: The body, in which any occurrence of the token is replaced.
        retry_after_s: How long the server asks not to be called, seconds; 0 if it does not say.
        location: The address to which the server redirects, without its user part; empty if it
            names none. Redirects are not followed.
    """

    status: int
    text: str
    retry_after_s: int = 0
    location: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status reports success (2xx)."""
        return 200 <= self.status < 300

    @property
    def unauthorized(self) -> bool:
        """Whether the server wants a token, or another one."""
        return self.status in (401, 403)

    @property
    def busy(self) -> bool:
        """Whether the server says that it has too much to do now (429 or 503)."""
        return self.status == 429 or (self.status == 503 and not self.out_of_memory)

    @property
    def out_of_memory(self) -> bool:
        """Whether the server says that a device's memory does not suffice."""
        return self.status == 507 or (self.status >= 400 and bool(_MEMORY.search(self.text)))

    def json(self) -> Any:
        """Returns the text as JSON, or None if it is no JSON.

        Text that holds half a character (a lone surrogate) counts as no JSON, since it could not be
        sent on to anybody.
        """
        try:
            value = json.loads(self.text)
            if "\\ud" in self.text or "\\uD" in self.text:
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except (ValueError, RecursionError):
            return None

    def line(self) -> str:
        """Returns the status and the server's own error message, in one line; of a redirect, where
        it leads.
        """
        if 300 <= self.status < 400 and self.location:
            return (f"{self.status}: redirected to {self.location[:_CUT]}; redirects are not "
                    "followed, so name that address")
        reply = self.json()
        if isinstance(reply, dict):
            reply = reply.get("error") or reply.get("message") or reply.get("detail") or reply
        if isinstance(reply, dict):
            reply = reply.get("message") or reply
        words = " ".join((reply if isinstance(reply, str) else self.text).split())
        return f"{self.status}: {words[:_CUT]}" if words else str(self.status)


class UnreadableAnswer(ServiceDied):
    """Raised when an answer has more than `BODY_MAX` bytes, or is packed (gzip) and cannot be
    unpacked. The engine need not be dead: perhaps the batch was too large.
    """


class Web:
    """The HTTP connection to one engine.

    Args:
        url: `http://host:port`, which a path may follow.
        token: A bearer token, or empty.
        timeout_s: How long a request may take from its connection to the end of its answer,
            seconds.

    Raises:
        ServiceRefused: httpx is not installed, or the certificates cannot be read.
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
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._slow = (httpx.TimeoutException, asyncio.TimeoutError)
        self._garbled = httpx.DecodingError
        self._unreached = (httpx.ConnectError, httpx.InvalidURL)
        self._broken = httpx.RequestError
        try:  # False: without https no certificate is looked at
            trusted = parts.scheme == "https" and _trusted(os.environ)
        except OSError as error:
            raise ServiceRefused(f"url: {self.where}: the certificates that SSL_CERT_FILE or "
                                 f"SSL_CERT_DIR names cannot be read: {error}") from None
        self._client = httpx.AsyncClient(
            verify=trusted,
            headers={"Accept-Encoding": "identity",  # unpacking would hold up the worker
                     **({"Authorization": f"Bearer {token}"} if token else {})},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0),
            trust_env=False, follow_redirects=False)

    async def get(self, path: str, most_s: float = math.inf) -> HttpResponse:
        """Returns the answer to a GET.

        Args:
            path: The path below the URL.
            most_s: How long it may take, seconds, if that is less than `timeout_s`.

        Raises:
            UnreadableAnswer: The answer is too large, or cannot be unpacked.
            ServiceDied: No answer came in time.
        """
        return await self._send("GET", path, None, min(most_s, self.timeout_s))

    async def post(self, path: str, body: Any = None) -> HttpResponse:
        """Returns the answer to a POST of `body` as JSON (None: no body).

        Raises:
            UnreadableAnswer: The answer is too large, or cannot be unpacked.
            ServiceDied: No answer came in time.
        """
        return await self._send("POST", path, None if body is None else json.dumps(body),
                                self.timeout_s)

    async def close(self) -> None:
        """Closes every connection to the engine."""
        await self._client.aclose()

    async def _send(self, method: str, path: str, content: str | None, limit_s: float
                    ) -> HttpResponse:
        try:
            async with self._connections:  # the wait for a free connection is not the engine's
                # httpx itself bounds the wait for each part of an answer, not that for all of it
                return await asyncio.wait_for(self._answer(method, path, content), limit_s)
        except self._slow:
            raise ServiceDied(f"{self.where}{path} did not answer within {limit_s:g} s") from None
        except self._garbled as error:
            raise UnreadableAnswer(f"{self.where}{path}: its answer cannot be unpacked: "
                                   f"{self._clean(str(error))[:_CUT]}") from None
        except self._unreached as error:
            raise ServiceDied(f"{self.where} cannot be reached: {self._words(error)}") from None
        except self._broken as error:
            raise ServiceDied(f"{self.where}{path} gave no whole answer: {self._words(error)}"
                              ) from None

    async def _answer(self, method: str, path: str, content: str | None) -> HttpResponse:
        body = bytearray()
        async with self._client.stream(
                method, self._url + path, content=content,
                headers={} if content is None else {"Content-Type": "application/json"}) as answer:
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > BODY_MAX:
                    raise UnreadableAnswer(f"{self.where}{path}: its answer has more than "
                                           f"{BODY_MAX} bytes; ask for less at once")
        pause = answer.headers.get("Retry-After", "")
        to = re.sub("//[^/?#]*@", "//", answer.headers.get("Location", ""))
        return HttpResponse(answer.status_code, self._clean(body.decode(errors="replace")),
                            int(pause) if re.fullmatch("[0-9]{1,6}", pause) else 0,
                            self._clean(" ".join(to.split())))

    def _words(self, error: Exception) -> str:
        return self._clean(" ".join(str(error).split()) or type(error).__name__)[:_CUT]

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


def _trusted(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Returns the certificates that the environment names, or those of httpx. Before 0.28 httpx
    ignores a name of a file that is not there. Raises OSError.
    """
    import httpx

    file, folder = environ.get("SSL_CERT_FILE"), environ.get("SSL_CERT_DIR")
    found = (ssl.create_default_context(cafile=file or None, capath=None if file else folder)
             if file or folder else httpx.create_ssl_context())
    # set from Python 3.13 on; authorities that sites make often fail by it
    found.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return found
