"""OpenEnv's wire where OpenEnv is not installed: the messages of its client and its server, over a
WebSocket of the standard library.

The messages are those in the source of OpenEnv 0.3.0: `reset`, `step` and
`close` from the client, `observation` and `error` from the server, and GET /health before them.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

# An environment whose action is a line for the shell. It serves one client after the other.
SERVER = r"""
import base64, hashlib, json, socket, struct, subprocess, sys
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

def message(stream):
    first = stream.read(2)
    if len(first) < 2 or first[0] & 15 == 8:
        return None
    size = first[1] & 127
    size = struct.unpack(">H", stream.read(2))[0] if size == 126 else size
    mask, data = stream.read(4), stream.read(size)
    return json.loads(bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

def answer(to, told):
    data = json.dumps(told).encode()
    size = bytes([len(data)]) if len(data) < 126 else struct.pack(">BH", 126, len(data))
    to.sendall(b"\x81" + size + data)

def step(action, limit):
    try:
        done = subprocess.run(["sh", "-c", action["command"]], capture_output=True, text=True,
                              timeout=limit)
        text = done.stdout + done.stderr + (f"[exit {done.returncode}]" if done.returncode else "")
    except subprocess.TimeoutExpired:
        text = "timed out"
    except UnicodeEncodeError:
        text = "the command is not UTF-8"
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": None,
                                            "done": False}}

server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    to, _ = server.accept()
    with to, to.makefile("rb") as stream:
        lines = []
        while (line := stream.readline().strip()):
            lines.append(line.decode())
        if not lines or "/ws" not in lines[0]:
            to.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + b'{"status":"healthy"}')
            continue
        key = next(line.split(": ")[1] for line in lines
                   if line.lower().startswith("sec-websocket-key"))
        accept = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
        to.sendall(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                    f"Connection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n").encode())
        while (told := message(stream)) and told["type"] != "close":
            answer(to, step(told.get("data") or {}, float(sys.argv[2]))
                   if told["type"] == "step" else
                   {"type": "observation", "data": {"observation": {}, "reward": None,
                                                    "done": False}})
"""


class StandInClient:
    """The synchronous client, as far as an environment's user sees it.

    Args:
        base_url: the URL of the server.
        provider: what is stopped with the client.
    """

    def __init__(self, base_url: str, provider: Any) -> None:
        self._url, self._provider = urlsplit(base_url), provider

    @classmethod
    def from_docker_image(cls, image: str, provider: Any, **options: Any) -> StandInClient:
        """Starts a container, waits for its server and connects."""
        base_url = provider.start_container(image, **options)
        provider.wait_for_ready(base_url)
        client = cls(base_url, provider)
        client.connect()
        return client

    def connect(self) -> None:
        """Connects to /ws."""
        self._socket = socket.create_connection((self._url.hostname, self._url.port), timeout=60)
        self._stream = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET /ws HTTP/1.1\r\nHost: {self._url.netloc}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode())
        if b" 101 " not in self._stream.readline():
            raise ConnectionError(f"no WebSocket at {self._url.geturl()}/ws")
        while self._stream.readline().strip():
            pass

    def reset(self, **options: Any) -> dict[str, Any]:
        """Begins an episode."""
        return self._ask({"type": "reset", "data": options})

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Takes a step."""
        return self._ask({"type": "step", "data": action})

    def close(self) -> None:
        """Disconnects and stops the container."""
        try:
            self._send({"type": "close"})
        except OSError:
            pass  # the server is gone
        self._stream.close()
        self._socket.close()
        self._provider.stop_container()

    def _ask(self, told: dict[str, Any]) -> dict[str, Any]:
        self._send(told)
        first = self._stream.read(2)
        if len(first) < 2:
            raise ConnectionError("the connection was closed")
        size = first[1] & 127
        size = struct.unpack(">H", self._stream.read(2))[0] if size == 126 else size
        answer: dict[str, Any] = json.loads(self._stream.read(size))["data"]
        return answer

    def _send(self, told: dict[str, Any]) -> None:
        data, mask = json.dumps(told).encode(), os.urandom(4)
        size = (bytes([0x80 | len(data)]) if len(data) < 126
                else struct.pack(">BH", 0x80 | 126, len(data)))
        self._socket.sendall(b"\x81" + size + mask + bytes(
            byte ^ mask[i % 4] for i, byte in enumerate(data)))
