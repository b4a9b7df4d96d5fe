"""Answers scrapes of metrics on a Unix socket, which only its owner can open.

A TCP port would need a password, since every user of a login node could read it. A Unix socket has
the file system's. Prometheus itself scrapes TCP only, so a site puts its agent or proxy in front
(docs/WATCHING.md).
"""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..errors import BrokerUnreachable, TangramError
from ..stale_socket import free_path, remove_own_socket

_SCRAPE_S = 30.0  # a peer that is silent for so long is hung up on
_ASK_S = 15.0  # without a scrape, after which the broker is asked whether the job still runs


class _QuietHandler(WSGIRequestHandler):
    timeout = _SCRAPE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every 15 s would fill the terminal."""


class _UnixServer(WSGIServer):
    address_family = socket.AF_UNIX
    quiet = False  # whether no scrape came within the last `timeout`

    def server_bind(self) -> None:
        """Binds without a look-up of a host name, which a path has not."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Returns a connection; its peer has no address."""
        return self.socket.accept()[0], ("unix", 0)

    def handle_timeout(self) -> None:
        """Notes that nobody has asked for a while."""
        self.quiet = True


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
    def is_last(error: TangramError) -> bool:
        return not isinstance(error, BrokerUnreachable) or over()

    lost: list[BaseException] = []
    server = _listening(path)
    server.set_app(_app(metrics, lost, is_last))
    server.timeout = _ASK_S
    try:
        while not lost:
            server.quiet = False
            server.handle_request()
            if server.quiet:
                try:
                    list(metrics.collect())
                except TangramError as error:
                    if is_last(error):
                        raise
        raise lost[0]
    finally:
        server.server_close()
        remove_own_socket(path)


def _app(metrics: Any, lost: list[BaseException], is_last: Callable[[TangramError], bool]) -> Any:
    """What answers a scrape; an error that ends the server is added to `lost`."""
    from prometheus_client import make_wsgi_app

    answer = make_wsgi_app(metrics)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            return answer(environ, start_response)
        except TangramError as error:
            if is_last(error):
                lost.append(error)
            start_response("503 Service Unavailable", [])
            return [b"the job's broker does not answer\n"]
        except (SystemExit, KeyboardInterrupt) as error:  # wsgiref catches everything
            lost.append(error)
            raise

    return app


def _listening(path: Path) -> _UnixServer:
    with free_path(path, "--listen"):
        return _UnixServer(str(path), _QuietHandler)  # type: ignore[arg-type]
