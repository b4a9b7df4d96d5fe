"""Sockets on asyncio's loop, for broker, worker and gateway: links, listeners, dialling.

Law: no listener without authentication: a peer that has not proven the job's key within
`HANDSHAKE_S` is dropped before any frame is read, and a Unix peer must be the same user. Of too
many that have not yet the oldest goes: who holds no key takes no descriptors from who does. Frames
are written with one gathering system call and read without copying payloads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from ...errors import AccessError, ProtocolError, TangramError
from ...protocol import auth
from ...protocol.frame import RECEIVE, Buffer, Inbox, Outbox, Parcel
from ...protocol.message import Message

HANDSHAKE_S = 5.0
TCP_TIMEOUT_S = 30.0  # as long as the broker's own patience with a silent worker
_NO_ROOM_S = 0.1  # until we look again, when there are no descriptors left
# Messages of one link that are handed on before all other links have their turn: one read may hold
# thousands of a client's, and whoever else speaks would wait until the last of them is dealt with.
TURN = 128
_IOV = 512  # well under every kernel's IOV_MAX

OnParcel = Callable[[Parcel], None]
OnLost = Callable[[str], None]


class SocketLink:
    """One authenticated conversation (fills `ports.Link`).

    `on_parcel` gets each message with its payload, `on_turn` is called once after each batch of
    them and when the peer has taken something of what was unsent, `on_lost` once with the reason
    when the peer is gone (never after `close`).
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self._loop = loop
        self._inbox, self._outbox = Inbox(), Outbox()
        self._backlog: deque[Buffer] = deque()
        self.unsent = 0  # bytes in the backlog
        self._parcels: Iterator[Parcel] | None = None  # what was read and is not yet handed on
        self._on_parcel: OnParcel = lambda parcel: None
        self._on_turn: Callable[[], None] = lambda: None
        self._on_lost: OnLost = lambda reason: None

    def attach(self, on_parcel: OnParcel, on_turn: Callable[[], None], on_lost: OnLost) -> None:
        """Starts reading."""
        assert self._sock is not None
        self._on_parcel, self._on_turn, self._on_lost = on_parcel, on_turn, on_lost
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """See `ports.Link.send`."""
        self._outbox.put(message, payload)

    def flush(self) -> None:
        """See `ports.Link.flush`."""
        frame = self._outbox.take()
        if frame and self._sock is not None:
            self.write(frame)

    def write(self, frame: list[Buffer]) -> None:
        """Sends buffers as they are (a whole frame), after what is still unsent."""
        if self._sock is None:
            return
        waiting = bool(self._backlog)
        self._backlog.extend(frame)
        self.unsent += sum(map(len, frame))
        if not waiting:
            self._drain()

    def close(self) -> None:
        """See `ports.Link.close`: a last try to send, then the end; `on_lost` is not called."""
        self.flush()
        if self._sock is not None and self._backlog:
            self._sock.settimeout(0.5)
            try:
                self._sock.sendall(b"".join(self._backlog))
            except OSError:
                pass  # the peer is gone: nothing is left to say
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
            parcels, self._parcels = self._parcels, None
            with suppress(ProtocolError):
                for parcel in parcels or ():  # they were read before the peer was lost
                    self._on_parcel(parcel)
            self._on_lost(reason)

    def _readable(self) -> None:
        assert self._sock is not None
        if self._parcels is not None:
            return  # first what was read before
        try:
            data = self._sock.recv(RECEIVE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"connection failed: {error.strerror}")
            return
        if not data:
            self._lose("connection closed by the peer")
            return
        self._parcels = self._inbox.feed(data)
        self._hand_on()

    def _hand_on(self) -> None:
        """Hands on the next TURN messages; the loop sees to all others before the rest of them."""
        parcels = self._parcels
        if parcels is None or self._sock is None:
            return
        left = TURN
        try:
            for parcel in parcels:
                self._on_parcel(parcel)
                left -= 1
                if not left:
                    self._loop.call_soon(self._hand_on)
                    break
            else:
                self._parcels = None
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
            # told on the next turn: the caller is in the middle of something
            self._loop.call_soon(self._lose, f"connection failed: {error.strerror}")
            return

    def _writable(self) -> None:
        assert self._sock is not None
        self._loop.remove_writer(self._sock.fileno())
        self._drain()
        self._on_turn()


def consume(backlog: deque[Buffer], sent: int) -> None:
    """Drops the first `sent` bytes of a queue of buffers."""
    while sent:
        head = backlog.popleft()
        if sent < len(head):
            backlog.appendleft(memoryview(head)[sent:])
            return
        sent -= len(head)


class Listener:
    """Accepts peers on one socket; each that proves the key becomes a SocketLink."""

    def __init__(self, sock: socket.socket, key: bytes, job: str,
                 on_link: Callable[[SocketLink], None]) -> None:
        self._sock, self._key, self._job, self._on_link = sock, key, job, on_link
        self._loop = asyncio.get_running_loop()
        self._greeting: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._unproven_max = unproven_max()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Stops accepting."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._greeting:
            task.cancel()

    def _reopen(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                peer, _ = self._sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # who waits would wake us for ever
                    self._loop.remove_reader(self._sock.fileno())
                    self._loop.call_later(_NO_ROOM_S, self._reopen)
                return  # else nobody waits, or the peer gave up before we came
            task = self._loop.create_task(self._greet(peer))
            self._greeting[task] = None
            task.add_done_callback(lambda done: self._greeting.pop(done, None))
            if len(self._greeting) > self._unproven_max:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]  # at once: it takes some turns to end
                oldest.cancel()

    async def _greet(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        try:
            if peer.family == socket.AF_UNIX:
                _check_same_user(peer)
            await asyncio.wait_for(self._handshake(peer), HANDSHAKE_S)
        except (OSError, TangramError, asyncio.TimeoutError, asyncio.CancelledError):
            peer.close()  # unproven: not a word
            return
        tune(peer)
        self._on_link(SocketLink(peer, self._loop))

    async def _handshake(self, peer: socket.socket) -> None:
        nonce = os.urandom(auth.NONCE)
        await self._loop.sock_sendall(peer, auth.MAGIC + nonce)
        answer = b""
        while len(answer) < auth.ANSWER:
            more = await self._loop.sock_recv(peer, auth.ANSWER - len(answer))
            if not more:
                raise AccessError("the peer left during the handshake")
            answer += more
        theirs, given = answer[: auth.NONCE], answer[auth.NONCE :]
        if not auth.proven(given, self._key, "peer", nonce, theirs, self._job):
            raise AccessError("the peer does not hold the key")
        await self._loop.sock_sendall(
            peer, auth.proof(self._key, "broker", nonce, theirs, self._job))


def unproven_max() -> int:
    """How many peers may be on the way to prove the key at once: a quarter of our descriptors."""
    return max(64, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 4096))


def _check_same_user(peer: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise AccessError(f"a process of user {uid} may not connect")


def tune(sock: socket.socket) -> None:
    """No delay for small frames on TCP. A host that is gone without a word (power, cable) ends the
    conversation after `TCP_TIMEOUT_S`; by itself the kernel would try for a quarter of an hour."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_TIMEOUT_S * 1000))


def listen_unix(path: str) -> socket.socket:
    """A Unix listener only its owner can reach (the folder must be 0700)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(old)
    sock.listen(1024)
    return sock


def listen_tcp(host: str) -> socket.socket:
    """A TCP listener on one interface, with a port of the kernel's choice."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, 0))
    sock.listen(1024)
    return sock
