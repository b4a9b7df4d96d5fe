"""A relay between a client or worker and its broker, which a test reads, changes or cuts."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable


class Relay:
    """A relay to a broker that can be cut: all connections over it break at once.

    Args:
        host, port: where it leads.
        change: gets each piece of bytes on its way, and returns what goes on instead.

    Attributes:
        port: where it listens on the loopback.
        seen: all bytes that came by, in both directions.
    """

    def __init__(self, host: str, port: int,
                 change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._to, self._change, self.seen = (host, port), change, bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
                pair = (peer, socket.create_connection(self._to))
            except OSError:
                self._listener.close()  # nobody is there: nor is the way
                return
            self._pairs.append(pair)
            threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one: socket.socket, two: socket.socket) -> None:
        with selectors.DefaultSelector() as chosen:
            chosen.register(one, selectors.EVENT_READ, two)
            chosen.register(two, selectors.EVENT_READ, one)
            try:
                while True:
                    for key, _ in chosen.select():
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            raise ConnectionError
                        self.seen += data
                        key.data.sendall(self._change(data))
            except OSError:
                for sock in (one, two):
                    sock.close()

    def shut(self) -> None:
        """Breaks all open connections; new ones are accepted."""
        for pair in self._pairs:
            for sock in pair:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # broken already
        self._pairs.clear()
