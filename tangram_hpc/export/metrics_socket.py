"""Answers scrapes of metrics on a Unix socket, which only its owner can open.

A TCP port would need a password, since every user of a login node could read it. A Unix socket has
the file system's. Prometheus itself scrapes TCP only, so a site puts its agent or proxy in front
(docs/EXPORT.md).

Each connection has a thread of its own, so that one that sends or reads slowly, or that a proxy
keeps in reserve, holds up no scrape and does not hide the end of the job.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..errors import BrokerUnreachable, TangramError
from ..stale_socket import free_path, remove_own_socket

_SCRAPE_S = 30.0  # a peer that is silent for so long is hung up on
_LOOK_S = 0.5  # between two looks whether a scrape has found that the job has ended
_ASK_S = 15.0  # without a scrape, after which the broker is asked whether the job still runs


class _QuietHandler(WSGIRequestHandler):
    timeout = _SCRAPE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every 15 s would fill the terminal."""

    def parse_request(self) -> bool:
        """Refuses requests of HTTP/0.9. No program makes one: it is what is left of a request whose
        sender ended within the first line. Python 3.14 fails when it is to answer it.
        """
        if not super().parse_request():
            return False
        if self.request_version == "HTTP/0.9":
            self.send_error(505)
            return False
        return True


class _UnixServer(socketserver.ThreadingMixIn, WSGIServer):
    address_family = socket.AF_UNIX
    daemon_threads = True
    heard_s = 0.0  # when the last connection came, by the monotonic clock

    def server_bind(self) -> None:
        """Binds without a look-up of a host name, which a path has not."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Returns a connection; its peer has no address."""
        self.heard_s = time.monotonic()
        return self.socket.accept()[0], ("unix", 0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, unless it says that the peer was silent for too long or has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve_on(path: Path, metrics: Any, over: Callable[[], bool]) -> NoReturn:
    """Answers scrapes until the process or the job ends; removes the socket then.

    A broker that does not answer in time may be stopped for a moment, or the next one may be
    starting, so a scrape then fails and the next one is answered again.

    Args:
        path: the socket; one that nobody listens on any more is replaced.
        metrics: a registry of prometheus_client.
        over: whether no broker will answer any more; asked after BrokerUnreachable.

    Raises:
        InvalidInput: the socket cannot be made.
        TangramError: the broker does not answer, since the job has ended.
    """
    lost: list[TangramError] = []

    def note(error: TangramError) -> None:
        if not isinstance(error, BrokerUnreachable) or over():
            lost.append(error)

    server = _listening(path)
    server.set_app(_app(metrics, note))
    server.timeout = _LOOK_S
    server.heard_s = time.monotonic()
    try:
        while not lost:
            server.handle_request()
            if time.monotonic() - server.heard_s > _ASK_S:
                try:
                    list(metrics.collect())
                except TangramError as error:
                    note(error)
                server.heard_s = time.monotonic()
        raise lost[0]
    finally:
        server.server_close()
        remove_own_socket(path)


def _app(metrics: Any, note: Callable[[TangramError], None]) -> Any:
    """What answers a scrape; an error is told to `note`."""
    from prometheus_client import make_wsgi_app

    answer = make_wsgi_app(metrics)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            return answer(environ, start_response)
        except TangramError as error:
            note(error)
            start_response("503 Service Unavailable", [])
            return [b"the job's broker does not answer\n"]

    return app


def _listening(path: Path) -> _UnixServer:
    with free_path(path, "--listen"):
        return _UnixServer(str(path), _QuietHandler)  # type: ignore[arg-type]
