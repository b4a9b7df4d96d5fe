"""Decides who may call a sandbox: a caller needs its access token, or a URL signed with that token.

All sandboxes of a server have the same URL, so requests name the sandbox in a header. A signed URL
of a file names no sandbox; its sandbox is the one with whose token it was signed. E2B's SDK for
Python before 2.26 does not name a sandbox to which it has connected; the token alone finds it.

A header names the sandbox's port too. Two of them are served: that of E2B's daemon, at which
commands and files are, and that at which `run_code` finds an interpreter. At another port a program
of the sandbox would listen.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.responses import JSONResponse
from starlette.types import Scope

from .sandboxes import Sandbox, SandboxRegistry
from .wire_errors import ApiError, RpcError, gone_response

PREFIXES = ("/process.Process/", "/filesystem.Filesystem/")
PATHS = ("/files", "/health")
DAEMON_PORT = "49983"
CODE_PORT = "49999"
CODE_PATHS = ("/execute", "/contexts", "/health")
VERBS = {"GET": "read", "HEAD": "read", "POST": "write"}
_SIGNED = ("path", "username", "signature", "signature_expiration")


class SandboxAccess:
    """Decides whether a request may reach the sandbox that it names.

    Args:
        sandboxes: the sandboxes of this server.
    """

    def __init__(self, sandboxes: SandboxRegistry) -> None:
        self._sandboxes = sandboxes

    async def __call__(self, scope: Scope, headers: Mapping[str, str]
                       ) -> Sandbox | JSONResponse | None:
        """Returns the sandbox that a request may use, or the answer that refuses the request; None
        if the request is not for a sandbox.

        Args:
            scope: the ASGI scope of the request.
            headers: the request's headers, with lower-case names.
        """
        path, number = scope["path"], headers.get("e2b-sandbox-id", "")
        port = headers.get("e2b-sandbox-port", DAEMON_PORT)
        if number and port != DAEMON_PORT:
            return await self._of_port(number, port, path, headers)
        if not path.startswith(PREFIXES) and path not in PATHS:
            return None
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        if "signature" in query and path == "/files":
            if any(len(query.get(name, ())) > 1 for name in _SIGNED):
                return _refused("a signed URL names path, username and signature once")
            return self._signed(scope["method"], {name: v[0] for name, v in query.items()})
        token = headers.get("x-access-token", "")
        if not number and not token:
            return _refused("name the sandbox in E2b-Sandbox-Id and send its X-Access-Token")
        sandbox = (await self._sandboxes.known(number) if number else
                   self._sandboxes.found_by(lambda sandbox: sandbox.accepts(token)))
        if sandbox is None:
            return gone_response(number[:40])
        if not sandbox.accepts(token):
            return _refused("X-Access-Token is not that of the sandbox")
        return sandbox

    async def _of_port(self, number: str, port: str, path: str, headers: Mapping[str, str]
                       ) -> Sandbox | JSONResponse:
        sandbox = await self._sandboxes.known(number)
        if sandbox is None:
            return gone_response(number[:40])
        if port != CODE_PORT or not path.startswith(CODE_PATHS):
            return ApiError(501, f"port {port:.5} of the sandbox: this server does not serve ports "
                                 "of sandboxes, but for run_code of e2b-code-interpreter"
                            ).response()
        if sandbox.accepts(headers.get("x-access-token", "")) or hmac.compare_digest(
                headers.get("e2b-traffic-access-token", "").encode(errors="replace"),
                sandbox.traffic_token.encode()):
            return sandbox
        return ApiError(401, "send the sandbox's token as X-Access-Token, or its traffic token as "
                             "E2B-Traffic-Access-Token").response()

    def _signed(self, method: str, query: Mapping[str, str]) -> Sandbox | JSONResponse:
        verb = VERBS.get(method, "")
        found = self._sandboxes.found_by(lambda sandbox: sandbox.signed(
            query.get("path", ""), verb, query.get("username", ""),
            query.get("signature_expiration", ""), query["signature"]))
        return found or _refused("the signature is of no open sandbox, or it has expired")


def _refused(text: str) -> JSONResponse:
    return RpcError("unauthenticated", text).response()
