"""Lets only clients with a key in, and bounds what each request may cost before it is understood.

The guard is an ASGI application around the real one. It refuses a request without a known key, a
body that is too large or too slow, and hands the client's name on in the request's state.
"""

from __future__ import annotations

import asyncio
import json

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .e2b.sandbox_access import SandboxAccess
from .keys import ClientKeys

BODY_MAX = 128 << 20  # bytes of one request's body
BODY_S = 60.0  # the longest time in which a body must have arrived


class Guard:
    """Checks each request's key, and the size and the time of its body.

    Args:
        app: the application that gets the requests of known clients.
        keys: the keys of the clients.
        access: decides which requests may reach a sandbox by its own token; None if there are no
            sandboxes.
        body_max: the most bytes of a body.
        body_s: the longest time that a body may take, in seconds.
    """

    def __init__(self, app: ASGIApp, keys: ClientKeys, body_max: int = BODY_MAX,
                 body_s: float = BODY_S, access: SandboxAccess | None = None) -> None:
        self._app, self._keys, self._access = app, keys, access
        self._body_max, self._body_s = body_max, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or refuses it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = _headers(scope)
        scope = self._without_key_in_path(scope, headers)
        sandbox = await self._access(scope, headers) if self._access is not None else None
        if isinstance(sandbox, Response):
            return await sandbox(scope, receive, send)
        if sandbox is not None:
            scope["state"]["sandbox"] = sandbox
        elif not scope["state"]["client"]:
            return await _refuse(send, 401, "no known key: send it as X-API-Key, as a bearer "
                                            "token, as http://any:KEY@host/, or as the first "
                                            "part of the path")
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self._body_s)
        except asyncio.TimeoutError:
            return await _refuse(send, 408, f"the body took longer than {self._body_s:g} s")
        except _TooLarge:
            return await _refuse(send, 413, f"the body has more than {self._body_max} bytes")
        if body is None:
            return None  # the client has hung up
        return await self._app(scope, _replayed(body, receive), send)

    def _without_key_in_path(self, scope: Scope, headers: dict[str, str]) -> Scope:
        """Returns the scope with the client's name in its state. A key is cut off the path, so that
        no log and no message shows it."""
        client, path = self._keys.from_headers(headers), scope["path"]
        first, slash, rest = path[1:].partition("/")
        if slash and (owner := self._keys.name_of(first)):
            client, path = client or owner, f"/{rest}"
        state = {**scope.get("state", {}), "client": client}
        return {**scope, "path": path, "raw_path": path.encode(), "state": state}

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._body_max:
                raise _TooLarge
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._body_max:
                raise _TooLarge
            if not message.get("more_body", False):
                return b"".join(parts)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


class _TooLarge(Exception):
    """A body has more bytes than it may have."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the whole body first, and then what really comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"detail": text, "code": status, "message": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
               (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="tangram"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


