"""A connected socket together with its encryption, and blocking calls on both.

Links, channels and pipes take the two apart (`sock`, `encryption`), since they never block.
"""

from __future__ import annotations

import socket

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

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()
