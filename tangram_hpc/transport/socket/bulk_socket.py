"""Blocking, authenticated sockets for few and large messages, such as those of the hybrid pool.

Invariants: connections between hosts are encrypted (`encryption.py`). No frame is accepted before
both sides have proven the key (`protocol/auth.py`). A peer that has not done so within
`HANDSHAKE_S` is dropped without an answer; when too many unproven peers are connected, the oldest
of them is dropped. The message in front of a payload is decoded first; then the payload is read
straight into an array of its size.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from ...errors import AccessError, ProtocolError
from ...protocol import auth
from ...protocol.frame import RECEIVE, Buffer
from ...protocol.gradient_messages import HEAD, AnyMemberMessage, MemberMessage, pack, sizes, unpack
from .address import addresses
from .asyncsock import listen_tcp, unproven_max
from .certificate import Certificate, address_of, certificate_for
from .dial import dial
from .encryption import Encryption
from .socket_connection import SocketConnection
from .tcp_options import HANDSHAKE_S, tune


class BulkLink:
    """One connection for large messages. One thread receives; any thread may send.

    Attributes:
        most: Length of the longest payload that is accepted, bytes; 0 at first.
    """

    def __init__(self, connection: SocketConnection) -> None:
        self._connection = connection
        self.most = 0
        self._sending = threading.Lock()
        self._closed = False

    def send(self, message: MemberMessage, *payload: Buffer) -> None:
        """Sends a message and a payload, which may be given in several parts.

        Raises:
            OSError: The peer is gone.
        """
        views = [memoryview(piece).cast("B") for piece in payload]
        with self._sending:
            self._connection.send(pack(message, sum(map(len, views))))
            for view in views:
                self._connection.send(view)

    def receive(self) -> tuple[AnyMemberMessage, bytearray] | None:
        """Returns the next message and its payload, or None when the peer is gone.

        Raises:
            ProtocolError: The bytes are not in the protocol, or the payload is longer than `most`.
        """
        head = self._exactly(HEAD.size)
        if head is None:
            return None
        message_size, payload_size = sizes(bytes(head))
        if payload_size > self.most:
            raise ProtocolError(f"a payload of {payload_size} bytes; at most {self.most} are taken")
        body = self._exactly(message_size)
        if body is None:
            return None
        message = unpack(bytes(body))
        payload = self._exactly(payload_size)
        return None if payload is None else (message, payload)

    def close(self) -> None:
        """Closes the connection and wakes the receiving thread. A second call does nothing."""
        if not self._closed:
            self._closed = True
            hang_up(self._connection.sock)
            self._connection.close()

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            try:
                got = self._connection.receive_into(view[at:])
            except OSError:
                return None
            if not got:
                return None
            at += got
        return data


class BulkListener:
    """Accepts connections for large messages.

    Each connection gets a thread, which authenticates the peer and then runs `serve`.

    Args:
        host: The address of the interface to listen on; the kernel chooses the port.
        key, job: The secret and the job name that a peer must prove.
        serve: Called with each authenticated connection; it returns when the connection has ended.

    Attributes:
        address: Where peers connect, such as `tls:10.0.0.1:40321#FINGERPRINT`.
    """

    def __init__(self, host: str, key: bytes, job: str, serve: Callable[[BulkLink], None]) -> None:
        self._key, self._job, self._serve = key, job, serve
        listen, address = addresses(host)
        self._sock = listen_tcp(listen)
        port = self._sock.getsockname()[1]
        self._certificate = certificate_for(listen)
        self.address = address_of(address, port, self._certificate)
        self._closed = False
        self._links: dict[int, BulkLink] = {}
        self._unproven: dict[int, socket.socket] = {}  # the oldest first
        self._unproven_max = unproven_max()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="bulk-accept", daemon=True).start()

    def close(self) -> None:
        """Stops accepting and closes every connection."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        hang_up(self._sock)  # wakes the thread that accepts
        self._sock.close()
        for link in links:
            link.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # the peer gave up, or no file descriptor is left
                continue
            with self._lock:
                self._unproven[id(peer)] = peer
                if len(self._unproven) > self._unproven_max:
                    hang_up(self._unproven.pop(next(iter(self._unproven))))
            threading.Thread(target=self._greet, args=(peer,), name="bulk", daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        try:
            connection = welcome(peer, self._key, self._job, self._certificate)
            peer.settimeout(None)
            tune(peer)
        except (OSError, AccessError):
            peer.close()  # an unproven peer gets no answer
            return
        finally:
            with self._lock:
                self._unproven.pop(id(peer), None)
        link = BulkLink(connection)
        with self._lock:
            if self._closed:
                link.close()
                return
            self._links[id(link)] = link
        try:
            self._serve(link)
        except (OSError, ProtocolError):
            pass  # `serve` has reported the error; the link ends in any case
        finally:
            link.close()
            with self._lock:
                self._links.pop(id(link), None)


def hang_up(sock: socket.socket) -> None:
    """Shuts a connection down, which wakes the receiving thread."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the connection was closed already


def welcome(sock: socket.socket, key: bytes, job: str, certificate: Certificate | None
            ) -> SocketConnection:
    """Runs the listener's half of the handshake: first TLS, then the proof of the key
    (`protocol/auth.py`), within `HANDSHAKE_S` in all.

    Raises:
        AccessError: The peer does not hold the key.
        OSError: The connection broke or timed out.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    encryption = None if certificate is None else Encryption(certificate.context, listening=True)
    connection = SocketConnection(sock, encryption)

    def received(most: int) -> bytes:
        # one deadline for all bytes, or a peer that sends a byte now and then could stay for ever
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if not (data := sock.recv(most)):
            raise AccessError("the peer left during the handshake")
        return data

    while encryption is not None and not encryption.established:
        sock.sendall(encryption.handshake(received(RECEIVE)))
    nonce, answer = os.urandom(auth.NONCE), b""
    connection.send(auth.MAGIC + nonce)
    while len(answer) < auth.ANSWER:
        data = received(auth.ANSWER - len(answer) if encryption is None else RECEIVE)
        answer += data if encryption is None else encryption.open(data)
    theirs, given = answer[: auth.NONCE], answer[auth.NONCE : auth.ANSWER]
    if not auth.proven(given, key, "peer", nonce, theirs, job):
        raise AccessError("the peer does not hold the key")
    connection.send(auth.proof(key, "broker", nonce, theirs, job))
    return connection


def dial_bulk(addresses: tuple[str, ...], key: bytes, job: str) -> BulkLink:
    """Connects to the first of these addresses that answers; raises as `dial` does."""
    return BulkLink(dial(addresses, key, job))
