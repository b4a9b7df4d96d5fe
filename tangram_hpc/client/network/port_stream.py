"""`PortStream`: a connection to a port of a session, to use like a connected socket.

Bytes are sent only as far as the sandbox has granted credit (`protocol/port_flow.py`), so a server
that does not read holds back this stream and no other. This side grants new credit when the caller
has read what was received, so a caller that does not read holds back the server. The connection's
thread brings bytes and credit; any thread may read and write.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from ...errors import InvalidInput, PortFailed
from ...interrupts import CallersLock, InterruptibleCondition
from ...protocol.message import (
    Message,
    StreamCredit,
    StreamData,
    StreamEnded,
)
from ...protocol.port_flow import CREDIT_STEP, PIECE_MAX


class StreamSender(Protocol):
    """Sends the messages of one stream; the client's connection is one."""

    def send_of_stream(self, stream: int, message: Message, data: bytes | None = None) -> None:
        """Sends a message, unless the stream has ended."""
        ...

    def end_stream(self, stream: int) -> None:
        """Tells the broker that the stream is closed, and forgets it."""
        ...


class PortStream:
    """A connection to a port of a session; made by `Session.connect`.

    It has the methods of a connected TCP socket that clients of protocols use, and behaves like
    one: `recv` returns b"" at the end, and a timeout is a TimeoutError. It has no descriptor, so it
    cannot be given to `select`; `Session.forward` gives real sockets.

    Attributes:
        session: the number of the session.
        port: the port that it is connected to.
        opened: whether the stream was connected; it stays True after the end.
    """

    def __init__(self, sender: StreamSender, number: int, session: int, port: int,
                 lock: CallersLock | None = None) -> None:
        self.session, self.port = session, port
        self._sender, self._number = sender, number
        self._changed = InterruptibleCondition(callers=lock)
        self._timeout: float | None = None
        self._credit = 0  # bytes that may be sent
        self.opened = False
        self._received = bytearray()
        self._read_since = 0  # bytes that were read since credit was granted last
        self._heard_end = self._said_end = self._closed = False
        self._failure: StreamEnded | None = None
        self._files = 0  # objects of `makefile` that are open

    # ---- on the connection's thread ----

    def on_data(self, data: bytes, last: bool) -> None:
        """Keeps received bytes until they are read; for the connection's thread."""
        with self._changed:
            self._received += data
            self._heard_end = self._heard_end or last
            self._changed.notify_all()

    def on_credit(self, count: int) -> None:
        """Notes that more may be sent; for the connection's thread."""
        with self._changed:
            self.opened = True
            self._credit += count
            self._changed.notify_all()

    def on_ended(self, message: StreamEnded) -> None:
        """Notes the end of the stream; for the connection's thread."""
        with self._changed:
            if not message.reason:
                self._heard_end = True
            self._failure = self._failure or message
            self._changed.notify_all()

    def disown(self) -> None:
        """Ends the copy in the child of a fork."""
        self._changed = InterruptibleCondition()
        self._failure = StreamEnded(self._number, "it belongs to the parent of this process")

    # ---- for the user ----

    def wait_open(self, timeout: float | None) -> None:
        """Waits until the stream is connected; for `Session.connect`.

        Raises:
            PortFailed: nothing listens there, or the session cannot be reached.
            TimeoutError: no answer came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.opened or self._failure, timeout):
                raise TimeoutError(f"port {self.port}: no answer within {timeout} s")
            if not self.opened:
                self._raise_failure()

    def settimeout(self, timeout: float | None) -> None:
        """Sets how long `recv` and `sendall` wait at most, in seconds; None for no limit."""
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        """Returns what `settimeout` has set."""
        return self._timeout

    def setsockopt(self, *option: Any) -> None:
        """Does nothing: libraries set options such as TCP_NODELAY, which is always on."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Returns from 1 to `size` bytes; waits for some if there is none.

        Returns:
            The bytes; b"" when the server has sent all of its bytes.

        Raises:
            PortFailed: the stream broke.
            TimeoutError: nothing came in time.
        """
        with self._changed:
            self._wait(lambda: self._received or self._heard_end)
            if not self._received and not self._heard_end:
                self._raise_failure()
            data = bytes(self._received[:size])
            del self._received[:size]
            self._read_since += len(data)
            if self._read_since >= CREDIT_STEP and not self._heard_end:
                self._sender.send_of_stream(self._number,
                                            StreamCredit(self._number, self._read_since))
                self._read_since = 0
            return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Reads into a buffer like `recv`, at most `size` bytes (0: its length); returns how many.
        """
        view = memoryview(buffer).cast("B")
        data = self.recv(min(size, len(view)) if size else len(view))
        view[:len(data)] = data
        return len(data)

    def send(self, data: Any, flags: int = 0) -> int:
        """Sends some of the bytes, at least one, and returns how many were sent.

        Raises:
            PortFailed: the stream broke or was closed.
            TimeoutError: the server has not read enough for another byte to be sent in time.
        """
        raw = bytes(memoryview(data).cast("B")[:PIECE_MAX])
        with self._changed:
            if self._said_end or self._closed:
                raise PortFailed(f"port {self.port}: this side has ended the stream", "EPIPE")
            if not raw:
                return 0
            self._wait(lambda: self._credit)
            if self._failure is not None:
                self._raise_failure()
            piece = raw[:self._credit]
            self._credit -= len(piece)
            self._sender.send_of_stream(self._number, StreamData(self._number), piece)
            return len(piece)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Sends all bytes; raises what `send` raises."""
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view):]

    def shutdown(self, how: int) -> None:
        """Tells the server that no more bytes follow (`socket.SHUT_WR`), as at the end of a request
        that has no length. `SHUT_RD` does nothing, and `SHUT_RDWR` does the same as `SHUT_WR`."""
        with self._changed:
            if how == socket.SHUT_RD or self._said_end or self._closed:
                return
            self._said_end = True
            self._sender.send_of_stream(self._number, StreamData(self._number, True), b"")

    def close(self) -> None:
        """Closes the stream; bytes that the server still sends are dropped. As with a socket, file
        objects of `makefile` can use the stream until they are closed as well. A second call does
        nothing."""
        with self._changed:
            self._closed = True
            if not self._files:
                self._sender.end_stream(self._number)
            self._changed.notify_all()

    def makefile(self, mode: str = "r", buffering: int = -1, *, encoding: str | None = None,
                 errors: str | None = None, newline: str | None = None) -> Any:
        """Returns a file object that reads or writes the stream, as `socket.makefile` does.

        Raises:
            InvalidInput: the mode is not made of "r", "w" and "b".
        """
        if not mode or set(mode) - set("rwb"):
            raise InvalidInput(f"mode: {mode!r} is not made of r, w and b")
        raw = _StreamFile(self, "r" in mode, "w" in mode)
        self._files += 1
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        binary: Any = (io.BufferedRWPair(raw, raw, size) if "r" in mode and "w" in mode else
                       io.BufferedReader(raw, size) if "w" not in mode else
                       io.BufferedWriter(raw, size))
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

    def file_closed(self) -> None:
        """Notes that an object of `makefile` was closed."""
        self._files -= 1
        if self._closed:
            self.close()

    def _wait(self, ready: Callable[[], Any]) -> None:
        """Waits until `ready` holds or the stream is over. The caller holds the lock.

        Raises:
            TimeoutError: neither happened within the time that `settimeout` has set.
        """
        limit = self._timeout
        until = None if limit is None else time.monotonic() + limit
        while not ready() and self._failure is None and not (self._closed and not self._files):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"port {self.port}: nothing moved within {limit} s")
            self._changed.wait(left)

    def _raise_failure(self) -> NoReturn:
        told = self._failure
        if told is None:
            raise PortFailed(f"port {self.port}: this stream was closed", "EBADF")
        raise PortFailed(told.reason or f"port {self.port}: the server has closed the connection",
                         told.code or "ECONNRESET")

    def __enter__(self) -> PortStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(f"a stream of process {os.getpid()} cannot be sent to another process")


class _StreamFile(io.RawIOBase):
    """The unbuffered file object of a stream."""

    def __init__(self, stream: PortStream, reads: bool, writes: bool) -> None:
        self._stream, self._reads, self._writes = stream, reads, writes

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def readinto(self, buffer: Any) -> int:
        return self._stream.recv_into(buffer)

    def write(self, data: Any) -> int:
        return self._stream.send(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with contextlib.suppress(PortFailed):
                self._stream.file_closed()
