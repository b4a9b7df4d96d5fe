"""The init's end of port streams: it connects to ports of its sandbox and carries bytes.

The init is in the network namespace of its sandbox, so it reaches the same servers on 127.0.0.1 and
::1 as a command of the sandbox. No socket blocks. Bytes for a server that does not read wait here,
at most as many as credit was granted for. While a client does not read, nothing is read from its
server (`protocol/port_flow.py`).
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress

from ...protocol.port_flow import CREDIT_STEP, PIECE_MAX, STREAMS_MAX, WINDOW, wrong_port
from ...protocol.process_frames import (
    ConnectPort,
    FromProcess,
    PortBytes,
    PortCredit,
    PortEnded,
)

_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
# the errors with which a seccomp filter or Landlock refuses sockets
_NO_SOCKETS = (errno.EAFNOSUPPORT, errno.EPERM, errno.EACCES)


class _Stream:
    """One connection to a port.

    Attributes:
        number: the stream's number.
        port: the port.
        left: the addresses that were not tried yet.
        socket: the connection, or the attempt to make one.
        connected: whether the server's kernel has accepted it.
        unsent: bytes that the server has not taken yet.
        last: whether the client sends no more bytes after `unsent`.
        left_by_client: whether the client has closed the stream, which ends once `unsent` is sent.
        taken: bytes that the server took and that were not granted again yet.
        credit: bytes that may still be sent to the client.
        heard_end: whether the server sends no more bytes.
        said_end: whether the server was told that the client sends no more bytes.
        watched: the events that are polled for now; 0 if the socket is not polled.
    """

    __slots__ = ("connected", "credit", "heard_end", "last", "left", "left_by_client", "number",
                 "port", "said_end", "socket", "taken", "unsent", "watched")

    def __init__(self, number: int, port: int) -> None:
        self.number, self.port = number, port
        self.left = list(_LOOPBACK)
        self.socket: socket.socket | None = None
        self.connected = self.last = self.heard_end = self.said_end = False
        self.left_by_client = False
        self.unsent = bytearray()
        self.taken, self.credit, self.watched = 0, WINDOW, 0

    @property
    def wanted(self) -> int:
        """The events to poll for. An idle socket is not polled, because poll would report its end
        again and again.
        """
        if not self.connected:
            return select.POLLOUT
        reads = not self.heard_end and self.credit > 0
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self.unsent else 0)

    @property
    def over(self) -> bool:
        """Whether both sides have ended their bytes."""
        return self.heard_end and self.said_end


class PortStreams:
    """All port streams of one sandbox.

    Args:
        poll: the init's poll object, in which the sockets are registered.
        send: sends a message to the worker.

    Attributes:
        fds: the descriptors of the streams' sockets.
    """

    def __init__(self, poll: select.poll, send: Callable[[FromProcess], None]) -> None:
        self._poll, self._send = poll, send
        self._streams: dict[int, _Stream] = {}
        self.fds: dict[int, _Stream] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def obey(self, order: ConnectPort | PortBytes | PortCredit | PortEnded) -> None:
        """Handles a message of the worker; one about a stream that has ended is ignored."""
        if isinstance(order, ConnectPort):
            return self._connect(order)
        stream = self._streams.get(order.stream)
        if stream is None:
            return
        if isinstance(order, PortEnded):
            if not stream.unsent or not stream.connected:
                return self._forget(stream)
            # the bytes that the client sent before it closed the stream are still delivered
            stream.last = stream.heard_end = stream.left_by_client = True
        elif isinstance(order, PortCredit):
            stream.credit = min(WINDOW, stream.credit + max(0, order.count))
        elif len(stream.unsent) + len(order.data) > WINDOW or stream.last:
            return self._end(stream, errno.EPROTO, "more bytes came than were granted")
        else:
            stream.unsent += order.data
            stream.last = order.last
            self._write(stream)
        self._watch(stream)

    def ready(self, fd: int) -> None:
        """Reads, writes or finishes connecting; the descriptor is one of `fds`."""
        stream = self.fds[fd]
        if not stream.connected:
            self._finish_connecting(stream)
        else:
            if stream.unsent:
                self._write(stream)
            if stream.number in self._streams and not stream.heard_end and stream.credit:
                self._read(stream)
        self._watch(stream)

    # ---- connecting ----

    def _connect(self, order: ConnectPort) -> None:
        stream = _Stream(order.stream, order.port)
        if order.stream in self._streams:
            return
        self._streams[order.stream] = stream
        if why := wrong_port(order.port):
            return self._end(stream, errno.EINVAL, why)
        left = next((one for one in self._streams.values() if one.left_by_client), None)
        if len(self._streams) > STREAMS_MAX and left is not None:
            self._forget(left)  # make room: its client has closed it, and its server does not read
        if len(self._streams) > STREAMS_MAX:
            return self._end(stream, errno.EMFILE, f"more than {STREAMS_MAX} streams are open")
        self._try_next(stream, errno.ECONNREFUSED)
        self._watch(stream)

    def _try_next(self, stream: _Stream, code: int) -> None:
        """Begins to connect to the next address; ends the stream with `code` if none is left."""
        while stream.left:
            self._let_go(stream)
            family, address = stream.left.pop(0)
            try:
                stream.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                found = stream.socket.connect_ex((address, stream.port))
            except OSError as error:
                found = error.errno or errno.EIO
            if found == 0:
                return self._connected(stream)
            if found == errno.EINPROGRESS:
                return
            # report the error of IPv4: a missing IPv6 loopback says nothing about the server
            code = found if family == socket.AF_INET else code
        what = ("this sandbox has no network of its own; open the session with "
                'network="loopback"' if code in _NO_SOCKETS else os.strerror(code))
        self._end(stream, code, f"port {stream.port}: {what}")

    def _finish_connecting(self, stream: _Stream) -> None:
        assert stream.socket is not None
        code = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return self._try_next(stream, code)
        # not connected yet if the event was for a former socket that had this descriptor
        with suppress(OSError):
            stream.socket.getpeername()
            self._connected(stream)

    def _connected(self, stream: _Stream) -> None:
        assert stream.socket is not None
        stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.connected = True
        self._send(PortCredit(stream.number, WINDOW))

    # ---- bytes ----

    def _read(self, stream: _Stream) -> None:
        assert stream.socket is not None
        try:
            data = stream.socket.recv(min(PIECE_MAX, stream.credit))
        except BlockingIOError:
            return
        except OSError as error:
            return self._end(stream, error.errno or errno.EIO, "the server broke the connection")
        stream.credit -= len(data)
        stream.heard_end = not data
        self._send(PortBytes(stream.number, data, not data))
        self._close_if_over(stream)

    def _write(self, stream: _Stream) -> None:
        """Sends the server as many of the waiting bytes as it takes without blocking."""
        if not stream.connected:
            return
        assert stream.socket is not None
        try:
            sent = stream.socket.send(stream.unsent, socket.MSG_NOSIGNAL) if stream.unsent else 0
        except BlockingIOError:
            return
        except OSError as error:
            return self._end(stream, error.errno or errno.EIO, "the server broke the connection")
        del stream.unsent[:sent]
        stream.taken += sent
        if stream.taken >= CREDIT_STEP or (stream.taken and not stream.unsent):
            self._send(PortCredit(stream.number, stream.taken))
            stream.taken = 0
        if stream.last and not stream.unsent:
            stream.said_end = True
            with suppress(OSError):  # the server has closed already
                stream.socket.shutdown(socket.SHUT_WR)
            self._close_if_over(stream)

    # ---- the end ----

    def _close_if_over(self, stream: _Stream) -> None:
        if stream.over:
            self._send(PortEnded(stream.number))
            self._forget(stream)

    def _end(self, stream: _Stream, code: int, reason: str) -> None:
        self._send(PortEnded(stream.number, reason, errno.errorcode.get(code, "EIO")))
        self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        self._let_go(stream)
        self._streams.pop(stream.number, None)

    def _let_go(self, stream: _Stream) -> None:
        """Closes a stream's socket, if it has one."""
        if stream.socket is None:
            return
        fd = stream.socket.fileno()
        if stream.watched:
            self._poll.unregister(fd)
        self.fds.pop(fd, None)
        stream.socket.close()
        stream.socket, stream.watched = None, 0

    def _watch(self, stream: _Stream) -> None:
        """Polls a stream's socket for what it waits for now."""
        if stream.number not in self._streams or stream.socket is None:
            return
        fd, wanted = stream.socket.fileno(), stream.wanted
        self.fds[fd] = stream
        if wanted == stream.watched:
            return
        if wanted:
            self._poll.register(fd, wanted)
        else:
            self._poll.unregister(fd)
        stream.watched = wanted
