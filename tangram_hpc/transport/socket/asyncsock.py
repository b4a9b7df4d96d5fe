"""Sockets on asyncio's loop, for broker, worker and gateway: links and listeners.

No listener is without authentication, and a TCP connection is encrypted before anything else
(`encryption.py`). A peer that has not proven a key of the job within `HANDSHAKE_S` is dropped
before any frame is read, and a Unix peer must be the same user. Which key it was says what the peer
may be. If too many peers are still in the handshake, the oldest is dropped: peers without the key
must not take the file descriptors of peers with it. Over TCP its connection is reset, and not
closed as after a wrong key, so that a peer with the key dials again.

Frames are written with one gathering system call, and payloads are read without a copy.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ...errors import AccessError, ProtocolError, TangramError
from ...protocol import auth
from ...protocol.frame import RECEIVE, Buffer, Envelope, Inbox, Outbox
from ...protocol.message import AnyMessage, Message
from .certificate import Certificate
from .encryption import Encryption
from .socket_connection import SocketConnection
from .tcp_options import HANDSHAKE_S, tune

_NO_ROOM_S = 0.1  # pause before the next accept when no descriptors are left
# How many messages of one link are handed on before other links get their turn, unless the driver
# says another number (`broker/turns.py`). One read may contain thousands of messages of one client,
# and all other peers would wait until the last one is handled.
TURN = 128
_IOV = 512  # buffers of one sendmsg; well below every kernel's IOV_MAX

OnMessage = Callable[[AnyMessage, "memoryview | None"], None]
OnLost = Callable[[str], None]


class SocketLink:
    """One authenticated connection (implements `ports.Link`).

    `on_message` gets each message and its payload. `on_turn` is called after each batch of
    messages, and when the peer has taken some of the unsent bytes. `on_lost` is called once, with
    the reason, when the peer is gone, and never after `close`. `turn` says how many messages the
    next batch has at most.

    Attributes:
        unsent: bytes that wait for the peer to read.
        role: what the peer may be, by the key that it has proven: `auth.CLIENT` or `auth.WORKER`;
            empty on the dialling side.
        name: the peer, for people; empty on the dialling side.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop,
                 encryption: Encryption | None = None, role: str = "", name: str = "") -> None:
        sock.setblocking(False)
        self.role, self.name = role, name
        self._sock: socket.socket | None = sock
        self._encryption = encryption
        self._loop = loop
        self._inbox, self._outbox = Inbox(), Outbox()
        self._backlog: deque[Buffer] = deque()
        self.unsent = 0
        self._envelopes: Iterator[Envelope] | None = None  # messages read but not handed on yet
        self._on_message: OnMessage = lambda message, payload: None
        self._on_turn: Callable[[], None] = lambda: None
        self._on_lost: OnLost = lambda reason: None
        self._turn: Callable[[], int] = lambda: TURN

    def attach(self, on_message: OnMessage, on_turn: Callable[[], None], on_lost: OnLost,
               turn: Callable[[], int] = lambda: TURN) -> None:
        """Sets the callbacks and starts reading."""
        assert self._sock is not None
        self._on_message, self._on_turn, self._on_lost = on_message, on_turn, on_lost
        self._turn = turn
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def detach(self) -> SocketConnection:
        """Gives the connection away, with calls that block; only before `attach`."""
        assert self._sock is not None
        self._sock.setblocking(True)
        return SocketConnection(self._sock, self._encryption)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queues a message for the next flush; see `ports.Link.send`."""
        self._outbox.put(message, payload)

    def flush(self) -> None:
        """Sends all queued messages as one frame; see `ports.Link.flush`."""
        frame = self._outbox.take()
        if frame and self._sock is not None:
            self.write(frame)

    def discard(self) -> None:
        """Drops all queued messages; see `ports.Link.discard`."""
        self._outbox.take()

    def write(self, frame: list[Buffer]) -> None:
        """Sends the buffers of a whole frame as they are, behind all unsent bytes."""
        if self._sock is None:
            return
        waiting = bool(self._backlog)
        if self._encryption is not None:
            frame = [self._encryption.seal(frame)]
        self._backlog.extend(frame)
        self.unsent += sum(map(len, frame))
        if not waiting:
            self._drain()

    def close(self) -> None:
        """Closes the connection; see `ports.Link.close`.

        Flushed bytes get half a second to leave. `on_lost` is not called.
        """
        if self._sock is not None and self._backlog:
            self._sock.settimeout(0.5)
            try:
                self._sock.sendall(b"".join(self._backlog))
            except OSError:
                pass  # the peer is gone
        self._shut()

    def _shut(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _lose(self, reason: str) -> None:
        if self._sock is not None:
            self._shut()
            envelopes, self._envelopes = self._envelopes, None
            with suppress(ProtocolError):
                for envelope in envelopes or ():  # messages that were read before the peer was lost
                    self._on_message(*envelope)
            self._on_lost(reason)

    def _readable(self) -> None:
        assert self._sock is not None
        if self._envelopes is not None:
            return  # earlier messages are still being handed on
        try:
            data = self._sock.recv(RECEIVE)
            if not data:
                self._lose("connection closed by the peer")
                return
            if self._encryption is not None:
                data = self._encryption.open(data)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"connection failed: {error.strerror}")
            return
        self._envelopes = self._inbox.feed(data)
        self._hand_on()

    def _hand_on(self) -> None:
        """Hands on the messages of one turn; the rest come after the other links' turn."""
        envelopes = self._envelopes
        if envelopes is None or self._sock is None:
            return
        remaining, on_message = self._turn(), self._on_message
        try:
            for envelope in envelopes:
                on_message(*envelope)
                remaining -= 1
                if not remaining:
                    self._loop.call_soon(self._hand_on)
                    break
            else:
                self._envelopes = None
        except ProtocolError as error:
            self._lose(str(error))
            return
        self._on_turn()

    def _drain(self) -> None:
        assert self._sock is not None
        try:
            while self._backlog:
                sent = self._sock.sendmsg([self._backlog[i] for i in
                                           range(min(len(self._backlog), _IOV))])
                consume(self._backlog, sent)
                self.unsent -= sent
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError as error:
            # reported by the loop later, as the caller is in the middle of a step
            self._loop.call_soon(self._lose, f"connection failed: {error.strerror}")
            return

    def _writable(self) -> None:
        """Sends unsent bytes; there may then be room for more, as after a turn."""
        assert self._sock is not None
        self._loop.remove_writer(self._sock.fileno())
        self._drain()
        self._on_turn()


def consume(backlog: deque[Buffer], sent: int) -> None:
    """Removes the first `sent` bytes from a queue of buffers."""
    while sent:
        head = backlog.popleft()
        if sent < len(head):
            backlog.appendleft(memoryview(head)[sent:])
            return
        sent -= len(head)


class Listener:
    """Accepts peers on one socket, and makes a SocketLink of each that proves the key.

    Args:
        sock: a listening socket.
        key: the key of clients.
        job: the job's name, which is part of the proof.
        on_link: called with each new link.
        certificate: with which connections are encrypted; None for a Unix socket.
        worker_key: the key of workers; empty: no worker may connect.
        on_refused: called with a peer's name, and why it was refused.
    """

    def __init__(self, sock: socket.socket, key: bytes, job: str,
                 on_link: Callable[[SocketLink], None],
                 certificate: Certificate | None = None, worker_key: bytes = b"",
                 on_refused: Callable[[str, str], None] = lambda peer, why: None) -> None:
        self._sock, self._job, self._on_link = sock, job, on_link
        self._keys = {auth.CLIENT: key} | ({auth.WORKER: worker_key} if worker_key else {})
        self._on_refused = on_refused
        self._certificate = certificate
        self._loop = asyncio.get_running_loop()
        self._greeting: dict[asyncio.Task[None], None] = {}  # running handshakes, oldest first
        self._unproven_max = unproven_max()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Stops accepting, and drops all peers that are in the handshake."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._greeting:
            task.cancel()

    def _reopen(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        # no more than may be in the handshake: a task that is cancelled before its first step would
        # leave its peer to the garbage collector, which closes and does not reset
        for _ in range(min(64, self._unproven_max)):
            try:
                peer, _ = self._sock.accept()
            except OSError as error:
                # no descriptor is free: stop accepting for a while, or the loop would spin
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._loop.remove_reader(self._sock.fileno())
                    self._loop.call_later(_NO_ROOM_S, self._reopen)
                return  # no peer waits any more, or it gave up before we accepted it
            task = self._loop.create_task(self._greet(peer))
            self._greeting[task] = None
            task.add_done_callback(lambda done: self._greeting.pop(done, None))
            if len(self._greeting) > self._unproven_max:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]  # removed now, as the task ends later
                oldest.cancel()

    async def _greet(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        name = ""
        try:
            name = _name_of(peer)
            if peer.family == socket.AF_UNIX:
                _check_same_user(peer)
            role, encryption = await asyncio.wait_for(self._handshake(peer), HANDSHAKE_S)
        except (OSError, TangramError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            if why := _why_refused(error):
                self._on_refused(name, why)
            if isinstance(error, asyncio.CancelledError):
                _reset_at_close(peer)
            peer.close()  # an unproven peer gets no answer
            return
        tune(peer)
        self._on_link(SocketLink(peer, self._loop, encryption, role, name))

    async def _handshake(self, peer: socket.socket) -> tuple[str, Encryption | None]:
        """Encrypts the connection, and lets the peer prove a key; returns what it may be."""
        encryption = await self._encrypted(peer) if self._certificate is not None else None

        async def send(data: bytes) -> None:
            await self._loop.sock_sendall(
                peer, data if encryption is None else encryption.seal([data]))

        nonce, answer = os.urandom(auth.NONCE), b""
        await send(auth.MAGIC + nonce)
        while len(answer) < auth.ANSWER:
            answer += await self._received(peer, encryption, auth.ANSWER - len(answer))
        theirs, given = answer[: auth.NONCE], answer[auth.NONCE : auth.ANSWER]
        for role, key in self._keys.items():
            if auth.proven(given, key, "peer", nonce, theirs, self._job):
                await send(auth.proof(key, "broker", nonce, theirs, self._job))
                return role, encryption
        raise AccessError("it does not hold a key of this start of the broker")

    async def _encrypted(self, peer: socket.socket) -> Encryption:
        assert self._certificate is not None
        encryption = Encryption(self._certificate.context, listening=True)
        while not encryption.established:
            answer = encryption.handshake(await self._received(peer, None, RECEIVE))
            if answer:
                await self._loop.sock_sendall(peer, answer)
        return encryption

    async def _received(self, peer: socket.socket, encryption: Encryption | None, most: int
                        ) -> bytes:
        data = await self._loop.sock_recv(peer, most if encryption is None else RECEIVE)
        if not data:
            raise ConnectionResetError(0, "the peer left during the handshake")
        return data if encryption is None else encryption.open(data)


def unproven_max() -> int:
    """Returns how many handshakes may run at once: a quarter of our descriptors, 64 to 4096."""
    return max(64, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 4096))


def _process_of(peer: socket.socket) -> tuple[int, int]:
    """Returns the process id and the user of a Unix peer."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _name_of(peer: socket.socket) -> str:
    """Returns who a peer is, for people."""
    if peer.family == socket.AF_UNIX:
        pid, uid = _process_of(peer)
        return f"process {pid} of user {uid}"
    host, port, *_ = peer.getpeername()
    return f"{host}:{port}"


def _why_refused(error: BaseException) -> str:
    """Returns why a peer was refused; empty if it left by itself or has to make room."""
    if isinstance(error, asyncio.TimeoutError):
        return f"it did not prove a key within {HANDSHAKE_S:.0f} s"
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS 1.3 as a peer does ({error.reason or error})"
    return str(error) if isinstance(error, TangramError) else ""


def _reset_at_close(peer: socket.socket) -> None:
    """Lets the close of a TCP connection reset it, which its dialling side tells from a refusal."""
    with suppress(OSError):  # the peer is gone
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _check_same_user(peer: socket.socket) -> None:
    _, uid = _process_of(peer)
    if uid != os.getuid():
        raise AccessError(f"a process of user {uid} may not connect")


def listen_unix(path: str) -> socket.socket:
    """Returns a listening Unix socket with mode 0600; its folder must be private (0700) as well."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(old)
    sock.listen(1024)
    return sock


def listen_tcp(host: str, ports: Iterable[int] = (0,)) -> socket.socket:
    """Returns a listening TCP socket on one address.

    Args:
        host: the address.
        ports: the ports to try, in this order; 0 stands for one that the kernel chooses.

    Raises:
        OSError: none of the ports can be had; the error is that of the last one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failed = OSError(errno.EADDRNOTAVAIL, "no port to listen on")
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:  # what is left of an earlier broker's connections must not block its port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(1024)
        except OSError as error:
            sock.close()
            failed = error
            continue
        return sock
    raise failed
