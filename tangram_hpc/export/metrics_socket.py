"""Answers scrapes of metrics on a Unix socket, which only its owner can open.

A TCP port would need a password, since every user of a login node could read it. A Unix socket has
the file system's. Prometheus itself scrapes TCP only, so a site puts its agent or proxy in front
(docs/WATCHING.md).
"""

from __future__ import annotations

import os
import socket
import socketserver
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..errors import InvalidInput, TangramError

_SCRAPE_S = 30.0  # a peer that is silent for so long is hung up on


class _QuietHandler(WSGIRequestHandler):
    timeout = _SCRAPE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every 15 s would fill the terminal."""


class _UnixServer(WSGIServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Binds without a look-up of a host name, which a path has not."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Returns a connection; its peer has no address."""
        return self.socket.accept()[0], ("unix", 0)


def serve_on(path: Path, metrics: Any) -> NoReturn:
    """Answers scrapes until the process or the job ends; removes the socket then.

    Args:
        path: the socket; one that nobody listens on any more is replaced.
        metrics: a registry of prometheus_client.

    Raises:
        InvalidInput: the socket cannot be made.
        TangramError: a scrape could not be answered, since the job has ended.
    """
    from prometheus_client import make_wsgi_app

    _remove_stale(path)
    before = os.umask(0o177)
    try:
        server = _UnixServer(str(path), _QuietHandler)  # type: ignore[arg-type]
    except OSError as error:
        raise InvalidInput(f"--listen {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    answer = make_wsgi_app(metrics)
    lost: list[TangramError] = []

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            return answer(environ, start_response)
        except TangramError as error:
            lost.append(error)
            start_response("503 Service Unavailable", [])
            return [b"the job's broker does not answer\n"]

    server.set_app(app)
    try:
        while not lost:
            server.handle_request()
        raise lost[0]
    finally:
        server.server_close()
        with suppress(OSError):
            path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidInput(f"--listen {path}: exists, and is no socket; name another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise InvalidInput(f"--listen {path}: another process listens there; name another path")
