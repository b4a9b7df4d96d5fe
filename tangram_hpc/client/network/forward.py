"""`PortForward`: a local address that leads to a port of a session, for programs that want sockets.

Only the process's own user may connect. A Unix socket has the mode 0600; if the caller names no
path, it also lies in a folder of mode 0700. On 127.0.0.1 everybody who is logged in on this machine
could connect, so the kernel is asked which user owns the socket at the other end (/proc/net/tcp),
and the connections of other users are reset before any of their bytes is read. Where
/proc/net/tcp cannot be read, no address on 127.0.0.1 is opened.

Each connection has two threads, which copy until both directions have ended. When a session has as
many streams as it may have, further connections wait in the listener's backlog.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from typing import NoReturn

from ...errors import InvalidInput, PortFailed, TangramError
from ...interrupts import InterruptibleLock
from ...private_folder import PrivateFolder, client_folder
from ...protocol.port_flow import PIECE_MAX, STREAMS_MAX
from ..connection import Connection
from ..forked import watch_forks
from ..request import seconds_of
from ..session_record import SessionRecord
from .port_connect import checked_port, connect_port
from .port_stream import PortStream

_TABLE = "/proc/net/tcp"
_ADDRESS, _REMOTE, _UID, _INODE = 1, 2, 7, 9  # columns of _TABLE
_LOOKS = 5  # how often the table is read: if it changes meanwhile, a row may be missing
_HOST = "127.0.0.1"
_UNIX_MAX = 100  # bytes of a Unix socket's path, less than the kernel's 107
_PAUSE_S = 0.1  # after an accept that failed, as while the process has too many open files
# Beyond it the kernel refuses or delays connections (of TCP by up to a minute); it takes at most
# net.core.somaxconn.
_BACKLOG = 4096
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class PortForward:
    """A local address that leads to a port of a session; made by `Session.forward`.

    Attributes:
        remote_port: the port of the session.
        host, port: the local address, "127.0.0.1" and a port; "" and 0 for a Unix socket.
        path: the path of the Unix socket; empty for none.
        refused: how many connections of other users were refused.
    """

    def __init__(self, connection: Connection, record: SessionRecord, port: int,
                 local_port: int = 0, unix: bool | str = False, wait_s: float = 0.0) -> None:
        self.remote_port = checked_port(port)
        self.host, self.port, self.path, self.refused = "", 0, "", 0
        self._connection, self._record = connection, record
        self._wait_s = seconds_of(wait_s, "wait_s")
        self._folder: PrivateFolder | None = None
        self._places = threading.BoundedSemaphore(STREAMS_MAX)
        self._lock = InterruptibleLock()
        self._open: set[tuple[socket.socket, PortStream]] = set()
        self._closed = False
        self._listener = self._listen_unix(unix) if unix else self._listen(local_port)
        watch_forks(self)
        threading.Thread(target=self._accept, name="tangram-forward", daemon=True).start()

    @property
    def address(self) -> str:
        """The local address: "127.0.0.1:PORT", or the path of the Unix socket."""
        return self.path or f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The local address for an HTTP client, "http://127.0.0.1:PORT".

        Raises:
            InvalidInput: it is a Unix socket, which has no URL.
        """
        if self.path:
            raise InvalidInput("url: a Unix socket has none; give `path` to the HTTP client")
        return f"http://{self.address}"

    def close(self) -> None:
        """Closes the address and all connections through it. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pairs = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for local, stream in pairs:
            _break(local, stream)
        if self._folder is not None:
            self._folder.remove()
        elif self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def disown(self) -> None:
        """Closes the child's copies after a fork: the address stays the parent's."""
        self._closed, self._lock = True, InterruptibleLock()
        self._listener.close()
        if self._folder is not None:
            self._folder.disown()
        for local, _ in self._open:
            local.close()

    # ---- listening ----

    def _listen(self, local_port: int) -> socket.socket:
        if not isinstance(local_port, int) or not 0 <= local_port < 1 << 16:
            raise InvalidInput(f"local_port: {local_port!r:.40} is not from 0 to 65535")
        if not os.access(_TABLE, os.R_OK):
            raise InvalidInput(f"unix: {_TABLE} cannot be read here, so other users of this machine"
                               " could not be kept away from a port; pass unix=True")
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_HOST, local_port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise InvalidInput(f"local_port: cannot listen on {_HOST}:{local_port} "
                               f"({error.strerror}); take another one, or 0 for any") from None
        self.host, self.port = listener.getsockname()
        return listener

    def _listen_unix(self, unix: bool | str) -> socket.socket:
        if isinstance(unix, str):
            self.path = os.path.abspath(unix)
        else:
            self._folder = client_folder()
            self.path = os.path.join(self._folder.path, str(self.remote_port))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(self.path)) > _UNIX_MAX:
                raise OSError(0, f"its path has more than {_UNIX_MAX} bytes")
            # the mode holds from the first instant; an umask would be the whole process's
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(self.path)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if self._folder is not None:
                self._folder.remove()
            raise InvalidInput(f"unix: cannot listen on {self.path} ({error.strerror}); name "
                               "another path, in a folder that is yours alone") from None
        return listener

    # ---- connections ----

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                local, peer = self._listener.accept()
            except OSError:
                self._places.release()
                if self._closed:
                    return
                time.sleep(_PAUSE_S)
                continue
            if not self.path and _user_of(peer, (self.host, self.port)) != os.getuid():
                self.refused += 1
                self._places.release()
                _reset(local)
                continue
            try:
                threading.Thread(target=self._serve, args=(local,), name="tangram-forward",
                                 daemon=True).start()
            except RuntimeError:  # the process has as many threads as it may have
                self._places.release()
                _reset(local)
                time.sleep(_PAUSE_S)

    def _serve(self, local: socket.socket) -> None:
        try:
            stream = connect_port(self._connection, self._record, self.remote_port, None,
                                  self._wait_s)
        except (TangramError, TimeoutError):
            self._places.release()
            return _reset(local)
        with self._lock:
            closed = self._closed
            self._open.add((local, stream))
        if closed:
            _break(local, stream)
        back = threading.Thread(target=_copy_back, args=(stream, local), daemon=True,
                                name="tangram-forward")
        try:
            back.start()
        except RuntimeError:  # the process has as many threads as it may have
            _break(local, stream)
        else:
            _copy_there(local, stream)
            back.join()
        with self._lock:
            self._open.discard((local, stream))
        stream.close()
        local.close()
        self._places.release()

    def __enter__(self) -> PortForward:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a forwarded port cannot be sent to another process; send its `address`")


def _copy_there(local: socket.socket, stream: PortStream) -> None:
    """Copies what the local program sends until its end."""
    try:
        while data := local.recv(PIECE_MAX):
            stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
    except (OSError, TangramError):
        _break(local, stream)


def _copy_back(stream: PortStream, local: socket.socket) -> None:
    """Copies what the server sends until its end."""
    try:
        while data := stream.recv(PIECE_MAX):
            local.sendall(data)
        local.shutdown(socket.SHUT_WR)
    except (OSError, PortFailed):
        # the other thread wakes up, and its `close` resets the connection: the program at the
        # other end must not take the bytes that it has read for the whole answer
        _break(local, stream, socket.SHUT_RD)


def _break(local: socket.socket, stream: PortStream, how: int = socket.SHUT_RDWR) -> None:
    """Breaks a connection, so that the threads that copy on it end."""
    with contextlib.suppress(OSError):
        local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        local.shutdown(how)
    stream.close()


def _reset(local: socket.socket) -> None:
    """Closes a connection with a reset, so that the other end sees a failure."""
    with contextlib.suppress(OSError):
        local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    local.close()


def _user_of(peer: tuple[str, int], here: tuple[str, int]) -> int:
    """Returns the user whose socket is the other end of a connection from `peer` to `here`, both on
    127.0.0.1; -1 if the user is not known, for example because the socket is closed already.
    """
    # the table shows an address as one number in the machine's own byte order
    ends = [f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
            for host, port in (peer, here)]
    for _ in range(_LOOKS):
        try:
            with open(_TABLE) as table:
                for line in table:
                    row = line.split()
                    if row[_ADDRESS:_REMOTE + 1] == ends:
                        return int(row[_UID]) if row[_INODE] != "0" else -1
        except (OSError, ValueError, IndexError):
            break
    return -1
