"""A connected socket together with its encryption, and blocking calls on both.

Links, channels and pipes take the two apart (`sock`, `encryption`), since they never block.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from ...protocol.frame import Buffer
from .encryption import Encryption

_CHUNK = 16 << 20  # bytes that one system call reads at most
_SEALED = 1 << 20  # bytes that are encrypted at once


class SocketConnection:
    """One connection. One thread may receive while another one sends.

    Attributes:
        sock: the socket.
        encryption: turns its bytes into what they mean; None if they are not encrypted.
    """

    def __init__(self, sock: socket.socket, encryption: Encryption | None = None) -> None:
        self.sock, self.encryption = sock, encryption

    def send(self, data: Buffer) -> None:
        """Sends all of these bytes.

        Raises:
            OSError: the peer is gone.
        """
        if self.encryption is None:
            self.sock.sendall(data)
            return
        view = memoryview(data)
        for at in range(0, len(view), _SEALED):
            self.sock.sendall(self.encryption.seal([view[at : at + _SEALED]]))

    def receive_into(self, view: memoryview) -> int:
        """Waits for bytes, and returns how many it has put into `view`; 0 if the peer is gone.

        Raises:
            OSError: the connection broke.
        """
        if self.encryption is None:
            return self.sock.recv_into(view, min(len(view), _CHUNK))
        while not (got := self.encryption.read_into(view)):
            data = self.sock.recv(_SEALED)
            if not data:
                return 0
            self.encryption.feed(data)
        return got

    def readable(self, timeout_s: float) -> bool:
        """Waits until the peer has sent something or is gone; returns False if neither was the case
        within so many seconds.
        """
        if self.encryption is not None and self.encryption.holds_bytes:
            return True  # they came together with what was read before
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def limit(self, timeout_s: float | None) -> None:
        """Sets how long a later call may wait before it raises a TimeoutError without an `errno`;
        None for no limit. (The kernel's own ETIMEDOUT is a TimeoutError too.)
        """
        self.sock.settimeout(timeout_s)

    def hang_up(self) -> None:
        """Ends the connection while another thread waits in a call, which then sees its end."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()
