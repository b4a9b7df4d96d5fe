"""The gateway's sockets to the broker: one for each rank (implements the gateway's `Pipes`).

The gateway forwards bytes that it does not read. One thread calls everything here. Dialling blocks,
so each attempt has a thread of its own, which hands its result over through a queue. Bytes that are
written before a socket is connected wait in its backlog.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from ..errors import TangramError
from ..protocol.frame import RECEIVE, Buffer
from .socket.asyncsock import consume
from .socket.encryption import Encryption
from .socket.socket_connection import SocketConnection

_IOV = 512  # buffers of one sendmsg; every kernel takes more
_ENDED = select.EPOLLHUP | select.EPOLLERR


class _Pipe:
    """One rank's socket.

    Attributes:
        name: the rank.
        sock: the connected socket; None while it is dialled.
        encryption: turns the socket's bytes into the rank's; None if they are not encrypted.
        backlog: buffers that wait to be sent; encrypted as soon as the socket is connected.
        paused: whether reading is stopped, because the rank does not keep up.
        watched: the events for which epoll watches the socket.
    """

    __slots__ = ("backlog", "encryption", "name", "paused", "sock", "watched")

    def __init__(self, name: int) -> None:
        self.name = name
        self.sock: socket.socket | None = None
        self.encryption: Encryption | None = None
        self.backlog: deque[Buffer] = deque()
        self.paused = False
        self.watched = 0

    def connect(self, connection: SocketConnection) -> None:
        """Takes a connection, and encrypts what waited for it."""
        self.encryption = connection.encryption
        waiting, self.backlog = self.backlog, deque()
        for data in waiting:
            self.queue(data)
        self.sock = connection.sock

    def queue(self, data: Buffer) -> None:
        """Puts the rank's bytes behind all that wait to be sent."""
        self.backlog.append(data if self.encryption is None else self.encryption.seal([data]))


class SocketPipes:
    """The sockets of all ranks.

    Args:
        dial: returns an authenticated, blocking connection, or raises a TangramError.
    """

    def __init__(self, dial: Callable[[], SocketConnection]) -> None:
        self._dial = dial
        self._epoll = select.epoll()  # made early: `select` needs a descriptor below 1024
        self._pipes: dict[int, _Pipe] = {}
        self._by_fd: dict[int, _Pipe] = {}
        self._dialled: deque[tuple[_Pipe, SocketConnection | str]] = deque()
        self._bell_out, self._bell_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._bell_out, select.EPOLLIN)

    def open(self, name: int) -> None:
        """Begins to dial the broker for this rank; an older pipe of the rank is closed."""
        self.close(name)
        pipe = self._pipes[name] = _Pipe(name)
        threading.Thread(target=self._try, args=(pipe,), daemon=True).start()

    def write(self, name: int, data: Buffer) -> None:
        """Sends bytes to the broker; does nothing if the rank has no pipe."""
        pipe = self._pipes.get(name)
        if pipe is None:
            return
        waiting = bool(pipe.backlog)
        pipe.queue(data)
        if pipe.sock is not None and not waiting:
            self._drain(pipe)

    def unsent(self) -> int:
        """Returns how many bytes of all ranks wait to be sent."""
        return sum(len(b) for p in self._pipes.values() for b in p.backlog)

    def connected(self, name: int) -> bool:
        """Returns whether a rank's pipe has a connected socket."""
        pipe = self._pipes.get(name)
        return pipe is not None and pipe.sock is not None

    def hold(self, name: int, held: bool) -> None:
        """Stops reading from the broker for this rank (`held`), or goes on with it."""
        pipe = self._pipes.get(name)
        if pipe is not None and pipe.paused != held:
            pipe.paused = held
            self._watch(pipe)

    def close(self, name: int) -> None:
        """Closes a pipe after sending its backlog, for which it waits half a second at most."""
        pipe = self._pipes.pop(name, None)
        if pipe is None:
            return
        if pipe.sock is not None:
            if pipe.backlog:
                try:
                    pipe.sock.settimeout(0.5)
                    pipe.sock.sendall(b"".join(pipe.backlog))
                except OSError:
                    pass  # the broker is gone
            self._shut(pipe)

    def wait(self, timeout_s: float) -> list[tuple[int, bytes, str]]:
        """Waits for events of any pipe, for `timeout_s` seconds at most.

        `select` is used for the wait because its timeout has microseconds; epoll's has
        milliseconds.

        Returns:
            (rank, bytes, "") for bytes that arrived, (rank, b"", reason) for a pipe that ended.
        """
        if timeout_s > 0:
            select.select([self._epoll], [], [], timeout_s)
        events: list[tuple[int, bytes, str]] = []
        for fd, what in self._epoll.poll(0):
            pipe = self._by_fd.get(fd)
            if fd == self._bell_out:
                os.read(fd, 4096)
            elif pipe is not None:
                if what & select.EPOLLOUT:
                    self._drain(pipe)
                if what & _ENDED or (what & select.EPOLLIN and not pipe.paused):
                    self._read(pipe, events)
        while self._dialled:
            self._settle(*self._dialled.popleft(), events)
        return events

    def _try(self, pipe: _Pipe) -> None:
        try:
            result: SocketConnection | str = self._dial()
        except (TangramError, OSError) as error:
            result = str(error)
        self._dialled.append((pipe, result))
        try:
            os.write(self._bell_in, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    def _settle(self, pipe: _Pipe, result: SocketConnection | str,
                events: list[tuple[int, bytes, str]]) -> None:
        current = self._pipes.get(pipe.name) is pipe
        if isinstance(result, str):
            if current:
                del self._pipes[pipe.name]
                events.append((pipe.name, b"", result))
        elif not current:
            self._send_last(pipe, result)
        else:
            result.sock.setblocking(False)
            pipe.connect(result)
            self._by_fd[result.sock.fileno()] = pipe
            self._epoll.register(result.sock, select.EPOLLIN)
            pipe.watched = select.EPOLLIN
            self._drain(pipe)

    @staticmethod
    def _send_last(pipe: _Pipe, connection: SocketConnection) -> None:
        """Sends the last bytes of a rank that closed its pipe, because the broker needs its Bye."""
        try:
            connection.sock.settimeout(0.5)
            connection.send(b"".join(pipe.backlog))
        except OSError:
            pass
        connection.close()

    def _read(self, pipe: _Pipe, events: list[tuple[int, bytes, str]]) -> None:
        assert pipe.sock is not None
        try:
            data = pipe.sock.recv(RECEIVE)
            reason = "" if data else "the broker closed the connection"
            if pipe.encryption is not None and data:
                data = pipe.encryption.open(data)
                if not data:
                    return  # a part of a record of TLS
        except BlockingIOError:
            return
        except OSError as error:
            data, reason = b"", f"connection failed: {error.strerror}"
        if reason:
            del self._pipes[pipe.name]
            self._shut(pipe)
        events.append((pipe.name, data, reason))

    def _drain(self, pipe: _Pipe) -> None:
        assert pipe.sock is not None
        try:
            while pipe.backlog:
                some = [pipe.backlog[i] for i in range(min(len(pipe.backlog), _IOV))]
                consume(pipe.backlog, pipe.sock.sendmsg(some))
        except BlockingIOError:
            pass
        except OSError:
            pipe.backlog.clear()  # the next read fails as well, and reports the reason
        self._watch(pipe)

    def _watch(self, pipe: _Pipe) -> None:
        if pipe.sock is None:
            return
        want = (0 if pipe.paused else select.EPOLLIN) | (select.EPOLLOUT if pipe.backlog else 0)
        if want != pipe.watched:
            pipe.watched = want
            self._epoll.modify(pipe.sock, want)

    def _shut(self, pipe: _Pipe) -> None:
        assert pipe.sock is not None
        self._epoll.unregister(pipe.sock)
        del self._by_fd[pipe.sock.fileno()]
        pipe.sock.close()
        pipe.sock = None
