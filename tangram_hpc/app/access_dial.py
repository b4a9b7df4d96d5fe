"""Dials the broker that an access file names, and reads the file anew each time.

A broker that is started again replaces the access file by one with another key and mostly other
addresses. A process that kept the content of the first file would never find the new broker.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ..errors import AccessError, BrokerUnreachable
from ..storage.access import Access, read_access
from ..transport.socket.dial import dial, through
from ..transport.socket.socket_connection import SocketConnection

_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0  # the first and the longest pause between two attempts


class AccessFileDialer:
    """Opens connections to the broker of an access file, and reads the file anew for each one.

    Args:
        path: the access file.
        address: the broker's address, to be used instead of those in the access file; empty for
            the file's own.
    """

    def __init__(self, path: Path, address: str = "") -> None:
        self._path, self._address = path, address
        self._refused: Access | None = None  # what the file said when the key was refused

    def read(self) -> Access:
        """Returns what the access file says now.

        Raises:
            AccessError: there is no access file, it must not be trusted, or its broker has ended.
        """
        known = read_access(self._path)
        if not self._address:
            return known
        return replace(known, addresses=(through(self._address, known.addresses),))

    def dial(self) -> SocketConnection:
        """Returns an authenticated, blocking connection.

        Raises:
            AccessError: as `read`, or the broker does not accept the key.
            BrokerUnreachable: no address answers; or a broker that would be started again ended the
                handshake, as it does when it is killed. If it does so twice, the key is wrong.
        """
        known = self.read()
        try:
            return dial(known.addresses, known.key, known.job)
        except AccessError as error:
            twice, self._refused = self._refused == known, known
            if twice or not known.back_within_s:
                raise
            raise BrokerUnreachable(str(error)) from None

    def dial_patiently(self) -> SocketConnection:
        """Returns a connection as `dial` does, but waits as long as the access file says for a
        broker that is being started again.

        Raises:
            AccessError, BrokerUnreachable: as `dial`, when it makes no sense to wait any longer.
        """
        begun, pause = time.monotonic(), _PAUSE_S
        while True:
            try:
                return self.dial()
            except BrokerUnreachable:
                if time.monotonic() - begun >= self.read().back_within_s:
                    raise
            time.sleep(pause)
            pause = min(_PAUSE_MAX_S, 2 * pause)
