"""A service engine behind plain HTTP that counts its calls where they are carried out.

It speaks the protocol of `config.services.HttpService`, with a park and a wake order, so that two
services can take turns on one device. It computes nothing: it notes the name in the arguments of
each call, and answers with that name and with a number that no other call gets.
"""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .actions_of_clients import note


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Workers are killed, and their connections break."""


class CountingEngine:
    """A server on a loopback port.

    Args:
        effects: the file that gets a line for each call that is carried out.

    Attributes:
        service: what to declare as a service, without `node` and `gpus`.
    """

    def __init__(self, effects: str) -> None:
        self._effects, self._numbers = effects, itertools.count(1)
        self._server = _Server(("127.0.0.1", 0), self._handler())
        port = self._server.server_address[1]
        self.service = {"backend": "http", "url": f"http://127.0.0.1:{port}", "batch": 8,
                        "park_path": "/park", "wake_path": "/wake", "batch_wait_ms": 1.0}
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path != "/call":
            return {}
        replies = []
        for request in json.loads(body)["requests"]:
            name = request["arguments"]["effect"]
            note(self._effects, name)
            replies.append({"value": f"{name} {next(self._numbers)}"})
        return {"replies": replies}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._say(json.dumps(engine._answer(self.path, body)).encode())

            def do_GET(self) -> None:
                self._say(b"{}")

            def _say(self, text: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: Any) -> None:
                """Nothing is logged."""

        return Handler
