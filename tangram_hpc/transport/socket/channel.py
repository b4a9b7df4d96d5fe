"""The client's connection over a socket (implements `ports.Channel`). It sleeps and never polls.

One thread calls everything but `wake`, which any thread may call. Frames go out with one gathering
system call, and the thread sleeps in the kernel until bytes or a wake-up arrive.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Iterator

from ...errors import ProtocolError
from ...interrupts import InterruptibleLock
from ...ports import ChannelLost
from ...protocol.frame import RECEIVE, Buffer, Envelope, Inbox
from .asyncsock import consume
from .encryption import Encryption

_IOV = 512  # buffers of one sendmsg; every kernel takes more


class SocketChannel:
    """A client's channel over one connected, authenticated socket."""

    via = "socket"

    def __init__(self, sock: socket.socket, encryption: Encryption | None = None) -> None:
        sock.setblocking(False)
        self._sock, self._encryption = sock, encryption
        self._inbox = Inbox()
        self._backlog: deque[Buffer] = deque()
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # `wake` may be called from a finalizer, which may interrupt `wake` in the same thread
        self._wake_lock = InterruptibleLock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_out, select.POLLIN)
        self._closed = False

    def send(self, frame: list[Buffer]) -> None:
        """Sends a frame, or queues what the kernel does not take; see `Channel.send`."""
        if self._encryption is not None:
            frame = [self._encryption.seal(frame)]
        self._backlog.extend(frame)
        self._drain()

    def wait(self, timeout_s: float, busy: bool) -> Iterator[Envelope]:
        """Sleeps until bytes or a wake-up arrive; see `Channel.wait`."""
        for fd, events in self._poll.poll(max(0, round(timeout_s * 1000))):
            if fd == self._wake_out:
                os.read(self._wake_out, 4096)
                continue
            if events & select.POLLOUT:
                self._drain()
            if events & ~select.POLLOUT:
                yield from self._receive()

    def wake(self) -> None:
        """Wakes a thread that sleeps in `wait`; see `Channel.wake`."""
        with self._wake_lock:
            if not self._closed:
                try:
                    os.write(self._wake_in, b"\0")
                except BlockingIOError:
                    pass  # full of wake-ups already

    def close(self) -> None:
        """Closes the connection; unsent bytes get half a second to leave. See `Channel.close`."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_in)
            os.close(self._wake_out)
        try:
            self._sock.settimeout(0.5)
            self._sock.sendall(b"".join(self._backlog))
        except OSError:
            pass  # the peer is gone
        self._sock.close()

    def abandon(self) -> None:
        """Lets go of the socket in the child of a fork; see `Channel.abandon`.

        The broker sees the parent's end only when no process holds the socket any more, so the
        child must not keep it.
        """
        if not self._closed:
            self._closed, self._wake_lock = True, InterruptibleLock()
            for fd in (self._wake_in, self._wake_out, self._sock.detach()):
                os.close(fd)

    def _receive(self) -> Iterator[Envelope]:
        try:
            data = self._sock.recv(RECEIVE)
            if not data:
                raise ChannelLost("the broker closed the connection")
            if self._encryption is not None:
                data = self._encryption.open(data)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelLost(f"connection failed: {error.strerror}") from None
        try:
            yield from self._inbox.feed(data)
        except ProtocolError as error:
            raise ChannelLost(str(error)) from None

    def _drain(self) -> None:
        try:
            while self._backlog:
                some = [self._backlog[i] for i in range(min(len(self._backlog), _IOV))]
                consume(self._backlog, self._sock.sendmsg(some))
        except BlockingIOError:
            self._poll.modify(self._sock, select.POLLIN | select.POLLOUT)
            return
        except OSError as error:
            raise ChannelLost(f"connection failed: {error.strerror}") from None
        self._poll.modify(self._sock, select.POLLIN)
