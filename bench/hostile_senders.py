"""Senders of hostile messages, for `hostile_messages`: each is one kind of attacker.

Messages come from a pool (`hostile_pool.py`), from which each sender picks with its own seed. A
sender counts every message or request that has left it, connects again whenever it is thrown out,
and reads what it is told, so that it is never taken for a slow peer. No sender sends what ends a
broker by design (`Shutdown`).
"""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.errors import ProtocolError
from tangram_hpc.protocol import auth
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.frame import Inbox, Outbox
from tangram_hpc.storage.access import WORKER_NAME, read_access
from tangram_hpc.transport.socket.dial import dial
from tangram_hpc.transport.socket.socket_connection import SocketConnection

BATCH = 40  # messages of one frame
FEW = 4  # the same for a worker, which is thrown out at its first wrong message
_PAYLOADS = (b"", b"{}", b"null", b"\xff", b"\x93\x08\0\0", b"x" * 900)
Sent = dict[str, int]


def _frame(rng: random.Random, messages: list[Any], batch: int) -> bytes:
    """A frame of messages; one in fifty has a byte that was changed, so that it cannot be read."""
    box = Outbox()
    for _ in range(batch):
        message = rng.choice(messages)
        box.put(message, rng.choice(_PAYLOADS) if getattr(message, "n", 0) else None)
    frame = bytearray(b"".join(box.take()))
    if rng.random() < 0.02:
        frame[rng.randrange(8, len(frame))] ^= 1 << rng.randrange(8)
    return bytes(frame)


def _alone(*messages: Any) -> bytes:
    box = Outbox()
    for message in messages:
        box.put(message, None)
    return b"".join(box.take())


class _Peer:
    """A peer with a key, which is back at once when it was thrown out."""

    def __init__(self, access: Path, hello: Callable[[int], bytes]) -> None:
        self._access, self._hello = access, hello
        self.joined = 0
        self._connection: SocketConnection | None = None

    def send(self, frame: bytes) -> bytes:
        """Sends a frame, and returns what has come meanwhile."""
        if self._connection is None:
            known = read_access(self._access)
            self._connection = dial(known.addresses, known.key, known.job)
            self.joined += 1
            frame = self._hello(self.joined) + frame
        heard = bytearray()
        try:
            self._connection.sock.settimeout(60)
            self._connection.send(frame)
            while select.select([self._connection.sock], [], [], 0)[0]:
                data = self._connection.sock.recv(1 << 20)
                if not data:
                    raise ConnectionResetError
                heard += data
        except OSError:
            self._connection.close()
            self._connection = None
        return bytes(heard)


def clients(access: Path, messages: list[Any], count: int, seed: int) -> Sent:
    """A client that says anything."""
    job, rng = read_access(access).job, random.Random(seed)
    peer = _Peer(access, lambda n: _alone(
        ms.ClientHello(ms.PROTOCOL_VERSION, job, f"hostile-{seed}-{n // 8}")))
    sent = 0
    while sent < count:
        peer.send(_frame(rng, messages, BATCH))
        sent += BATCH
    return {"client": sent, "client_joined": peer.joined}


def workers(access: Path, messages: list[Any], count: int, seed: int) -> Sent:
    """A worker that says anything. It drains itself first, so that nobody's work is lent to it."""
    job, rng = read_access(access).job, random.Random(seed)
    spec = NodeSpec("hostile", "nowhere", (0,), 64, component="hostile")
    peer = _Peer(access.with_name(WORKER_NAME), lambda n: _alone(
        ms.WorkerHello(ms.PROTOCOL_VERSION, job, spec), ms.Leaving("it is hostile")))
    sent = 0
    while sent < count:
        peer.send(_frame(rng, messages, FEW))
        sent += FEW
    return {"worker": sent, "worker_joined": peer.joined}


def strangers(access: Path, count: int, seed: int) -> Sent:
    """Peers without a key: noise, halves of a handshake, wrong proofs, and frames before it."""
    known, rng, sent, let_in = read_access(access), random.Random(seed), 0, 0
    hello = _alone(ms.ClientHello(ms.PROTOCOL_VERSION, known.job, "stranger"))
    while sent < count:
        ours = rng.randbytes(auth.NONCE)
        said = rng.choice([
            b"", rng.randbytes(rng.randrange(1, 300)), hello, ours, b"GET / HTTP/1.1\r\n\r\n",
            ours + auth.proof(rng.randbytes(32), "peer", ours, ours, known.job) + hello,
            ours + auth.proof(known.key, "peer", ours, ours, "other") + hello])
        address = rng.choice(known.addresses)
        with suppress(OSError), _connected(address) as sock:
            greeting = sock.recv(auth.GREETING) if rng.random() < 0.7 else b""
            sock.sendall(said)
            if len(said) >= auth.ANSWER and greeting:
                let_in += bool(sock.recv(1))
        sent += 1
    return {"stranger": sent, "stranger_let_in": let_in}


def _connected(address: str) -> socket.socket:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(rest)
        return sock
    host, _, port = rest.partition("#")[0].rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=10)


def tokens(access: Path, count: int, seed: int) -> Sent:
    """A client that guesses the tokens of a shared session whose name it knows."""
    known, rng, sent, let_in = read_access(access), random.Random(seed), 0, 0
    peer = _Peer(access, lambda n: _alone(
        ms.ClientHello(ms.PROTOCOL_VERSION, known.job, f"guesser-{seed}-{n}")))
    inbox, joined = Inbox(), 0
    while sent < count:
        box = Outbox()
        for _ in range(BATCH):
            token = rng.choice(["", "x" * 32, rng.randbytes(24).hex(), "ÿ" * rng.randrange(40)])
            box.put(ms.AttachSession(sent, rng.choice(["shared", "shared", "other"]), token,
                                     rng.random() < 0.5))
            sent += 1
        heard = peer.send(b"".join(box.take()))
        if peer.joined != joined:
            inbox, joined = Inbox(), peer.joined
        with suppress(ProtocolError):
            let_in += sum(isinstance(m, ms.Attached) for m, _ in inbox.feed(heard))
    return {"token": sent, "token_let_in": let_in}


_VERBS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "\0", "G" * 300)
_PATHS = ("/", "/health", "/run_code", "/sandboxes", "/v2/sandboxes",
          "/files?path=../../etc/passwd", "/sandboxes/%00", "/process.Process/Start",
          "/" + "a/" * 500, "/%2e%2e/%2e%2e", "*")
_BODIES = (b"", b"{}", b"[" * 3000, b'{"code": "x", "language": 7}', b'{"timeout": 1e400}', b"\xff",
           b'{"templateID": "\\ud800"}', b'{"code": "' + b"x" * 5000 + b'"}', b"null")


def requests(url: str, key: str, count: int, seed: int) -> Sent:
    """Requests to the HTTP server, half of them with its key; and what is no request at all."""
    host, _, port = url.rpartition("//")[2].partition(":")
    rng, sent, answered = random.Random(seed), 0, 0
    while sent < count:
        # a body that does not come is waited for by the server, and not here
        with suppress(OSError), socket.create_connection((host, int(port)), 0.5) as sock:
            while sent < count:
                sent += 1
                sock.sendall(_request(rng, key))
                heard = sock.recv(1 << 16)
                answered += heard.startswith(b"HTTP/1.1 ")
                if not heard or b"connection: close" in heard.lower():
                    break
    return {"http": sent, "http_answered": answered}


def _request(rng: random.Random, key: str) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n"
    body = rng.choice(_BODIES)
    length = rng.choice([str(len(body))] * 9 + ["-1", "99999999999999", "x"])
    allowed = rng.choice([key, key, "wrong", ""])
    lines = [f"{rng.choice(_VERBS)} {rng.choice(_PATHS)} HTTP/1.1", "Host: x",
             f"Content-Length: {length}", f"X-API-Key: {allowed}",
             f"Content-Type: {rng.choice(['application/json', 'application/connect+json', ''])}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
