"""Dials the broker that an access file names, and reads the file anew each time.

A broker that is started again replaces the access file by one with another key and mostly other
addresses. Who kept what the first file said would never find the new broker.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from ..storage.access import Access, read_access
from ..transport.socket.dial import dial


class AccessFileDialer:
    """Opens sockets to the broker of an access file, and reads the file anew for each one.

    Args:
        path: the access file.
        address: the broker's address, which stays in force; empty for those in the access file.
    """

    def __init__(self, path: Path, address: str = "") -> None:
        self._path, self._address = path, address

    def read(self) -> Access:
        """Returns what the access file says now.

        Raises:
            AccessError: there is no access file, it must not be trusted, or its broker has ended.
        """
        known = read_access(self._path)
        return replace(known, addresses=(self._address,)) if self._address else known

    def dial(self) -> socket.socket:
        """Returns a connected, authenticated, blocking socket.

        Raises:
            AccessError: as `read`, or the broker does not accept the key.
            BrokerUnreachable: no address answers.
        """
        known = self.read()
        return dial(known.addresses, known.key, known.job)
