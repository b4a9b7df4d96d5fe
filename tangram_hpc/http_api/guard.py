"""Lets only clients with a key in, and bounds what each request may cost before it is understood.

The guard is an ASGI application around the real one. It refuses a request without a known key, a
body that is too large or too slow, and hands the client's name on in the request's state.

A client that still sends its body when the connection is closed sees a reset connection, and never
the answer. So the rest of a refused body is read and dropped first, for a bounded time.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .e2b.sandbox_access import SandboxAccess
from .e2b.upload_memory import body_held
from .e2b.wire_errors import ApiError
from .keys import ClientKeys

BODY_MAX = 128 << 20  # bytes of one request's body
BODY_S = 60.0  # the longest time in which a body must have arrived
REST_MAX = 1 << 30  # bytes of a refused body that are read and dropped before the answer
REST_S = 10.0  # and the longest time for that


class Guard:
    """Checks each request's key, and the size and the time of its body.

    Args:
        app: the application that gets the requests of known clients.
        keys: the keys of the clients.
        access: decides which requests may reach a sandbox by its own token; None if there are no
            sandboxes.
        body_max: the most bytes of a body.
        body_s: the longest time that a body may take, in seconds.
        rest_s: the longest time for which the rest of a refused body is read, in seconds.
    """

    def __init__(self, app: ASGIApp, keys: ClientKeys, body_max: int = BODY_MAX,
                 body_s: float = BODY_S, access: SandboxAccess | None = None,
                 rest_s: float = REST_S) -> None:
        self._app, self._keys, self._access = app, keys, access
        self._body_max, self._body_s, self._rest_s = body_max, body_s, rest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or refuses it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = _headers(scope)
        scope = self._without_key_in_path(scope, headers)
        sandbox = await self._access(scope, headers) if self._access is not None else None
        if isinstance(sandbox, Response):
            await self._drop_body(headers, receive)
            return await sandbox(scope, receive, send)
        if sandbox is not None:
            scope["state"]["sandbox"] = sandbox
        elif not scope["state"]["client"]:
            await self._drop_body(headers, receive)
            return await _refuse(send, 401, "no known key: send it as X-API-Key, as a bearer "
                                            "token, as http://any:KEY@host/, or as the first "
                                            "part of the path")
        if sandbox is None:
            return await self._serve(scope, headers, receive, send)
        try:
            async with body_held(sandbox, scope, headers, self._body_max):
                return await self._serve(scope, headers, receive, send)
        except ApiError as error:
            await self._drop_body(headers, receive)
            return await error.response()(scope, receive, send)

    async def _serve(self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send
                     ) -> None:
        """Reads the body and hands the request on, or refuses it for its body."""
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self._body_s)
        except asyncio.TimeoutError:
            return await _refuse(send, 408, f"the body took longer than {self._body_s:g} s")
        except _TooLarge as error:
            if error.more:
                await self._drop_body(headers, receive)
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

    async def _body(self, scope: Scope, receive: Receive) -> bytearray | None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._body_max:
                raise _TooLarge(more=True)
        body = bytearray()  # which grows in its place, where a list of parts would be copied
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._body_max:
                raise _TooLarge(message.get("more_body", False))
            if not message.get("more_body", False):
                return body

    async def _drop_body(self, headers: dict[str, str], receive: Receive) -> None:
        if "expect" not in headers:  # else the client sends nothing before it is told to
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_drop(receive), self._rest_s)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def _drop(receive: Receive) -> None:
    size = 0
    while size < REST_MAX:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        size += len(message.get("body", b""))


class _TooLarge(Exception):
    """A body has more bytes than it may have. `more`: the client still sends it."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.more = more


def _replayed(body: bytearray, receive: Receive) -> Receive:
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


