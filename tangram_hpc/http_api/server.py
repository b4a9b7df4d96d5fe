"""Binds the HTTP server to one address, serves until it is told to end, and tells where it is."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from .. import InvalidInput
from ..resources import open_files
from ..stale_socket import free_path, remove_own_socket
from .cut_off import tell_cut_offs_in_one_line

KEEP_ALIVE_S = 180  # longer than clients pause between two requests on one connection
BACKLOG = 2048
GRACE_S = 5  # for what is being answered when the server ends


@dataclass(frozen=True)
class Where:
    """Where the server listens.

    Attributes:
        host: an address of this machine.
        port: a port; 0 for any free one.
        unix: the path of a Unix socket instead; empty for none.
        tls_cert, tls_key: PEM files of the certificate chain and its key; empty for plain HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 0
    unix: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def is_open(self) -> bool:
        """Whether keys travel over a network in the clear."""
        return not self.unix and not self.tls_cert and not _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(where: Where) -> tuple[socket.socket, str]:
    """Returns a listening socket and the URL that leads to it.

    Raises:
        InvalidInput: the address cannot be used; the message names the option.
    """
    if bool(where.tls_cert) != bool(where.tls_key):
        raise InvalidInput("--tls-cert and --tls-key: give both or neither")
    for name, path in (("--tls-cert", where.tls_cert), ("--tls-key", where.tls_key)):
        if path and not os.access(path, os.R_OK):
            raise InvalidInput(f"{name}: {path} cannot be read")
    if where.unix:
        return _bind_unix(Path(where.unix))
    if where.host in ("", "0.0.0.0", "::"):
        raise InvalidInput("--host: name one address of this machine, not all of them")
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(found[4][:2], family=found[0], backlog=BACKLOG)
        # asyncio does so itself only for sockets that name their protocol, which these do not; with
        # Nagle's algorithm each answer in two parts takes 40 ms longer
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise InvalidInput(f"--host {where.host} --port {where.port}: {error.strerror}") from None
    address, port = listening.getsockname()[:2]
    shown = f"[{address}]" if found[0] == socket.AF_INET6 else address
    return listening, f"{'https' if where.tls_cert else 'http'}://{shown}:{port}"


def _bind_unix(path: Path) -> tuple[socket.socket, str]:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with free_path(path, "--unix"):
            listening.bind(str(path))
            listening.listen(BACKLOG)
    except InvalidInput:
        listening.close()
        raise
    return listening, f"unix:{path}"


async def serve(app: ASGIApp, where: Where, key: str,
                watch: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], None],
                leave: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM, SIGINT, SIGHUP or the stop that `watch` was given; prints one JSON line
    with `url` and `key` when it can be reached.

    Args:
        app: the application.
        where: where to listen.
        key: the key to print; empty for none.
        watch: called with the event loop and a function that ends the server.
        leave: called when the server begins to end; ends the streams that would never end by
            themselves. Requests have `GRACE_S` from then on and are cut off afterwards.

    Raises:
        InvalidInput: the address cannot be used.
    """
    open_files.allow_many()  # one for each waiting caller
    listening, url = bind(where)
    if where.is_open:
        print(f"tangram: warning: {where.host} is reached over a network, and keys travel in the "
              "clear; give --tls-cert and --tls-key", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S, ssl_certfile=where.tls_cert or None,
        ssl_keyfile=where.tls_key or None, lifespan="off", server_header=False)
    tell_cut_offs_in_one_line()
    server = _Server(config, json.dumps({"url": url, "key": key or None}), leave)

    def stop() -> None:
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            loop.add_signal_handler(number, stop)
    watch(loop, stop)
    try:
        await server.serve(sockets=[listening])
    finally:
        listening.close()
        if where.unix:
            remove_own_socket(Path(where.unix))


class _Server(uvicorn.Server):
    """A server that prints one line once it can be reached, and ends its streams when it ends."""

    def __init__(self, config: uvicorn.Config, line: str, leave: Callable[[], None]) -> None:
        super().__init__(config)
        self._line, self._leave = line, leave

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections, and says so."""
        await super().startup(sockets)
        print(self._line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the streams, and waits for what is being answered."""
        self._leave()
        await super().shutdown(sockets)

