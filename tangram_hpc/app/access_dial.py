"""Dials the broker that an access file names, and reads the file anew each time.

A broker that is started again replaces the access file by one with another key and mostly other
addresses. A process that kept the content of the first file would never find the new broker. A file
of an earlier epoch than one that was read before is that of a superseded broker, and names no
address.

A broker may listen on its Unix socket only, as that of a `LocalCluster` does unless it is told
otherwise. Such a broker cannot be reached from another host, nor from a process that sees another
folder under the socket's path, as a job with a `/tmp` of its own does. The error then says so.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

from ..errors import AccessError, BrokerUnreachable
from ..storage.access import Access, read_access
from ..transport.socket.dial import dial, through
from ..transport.socket.socket_connection import SocketConnection

_REMEDY = ("start it with `bind` set to an address, interface or network that this host reaches, "
           "such as LocalCluster(bind=\"0.0.0.0\")")
_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0  # the first and the longest pause between two attempts


class OutOfSight(BrokerUnreachable):
    """This process does not see the folder of the only socket that the broker listens on."""


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
        self._epoch = 0  # the highest that was read

    def read(self) -> Access:
        """Returns what the access file says now; no address if its broker has been superseded.

        Raises:
            AccessError: there is no access file, it must not be trusted, or its broker has ended.
        """
        known = read_access(self._path)
        if 0 < known.epoch < self._epoch:
            return replace(known, addresses=())
        self._epoch = max(self._epoch, known.epoch)
        if self._address and known.addresses:
            return replace(known, addresses=(through(self._address, known.addresses),))
        return known

    def dial(self) -> SocketConnection:
        """Returns an authenticated, blocking connection.

        Raises:
            AccessError: as `read`; or the broker does not accept the key, or it is on another host
                and listens on a Unix socket only.
            BrokerUnreachable: no address answers; or a broker that would be started again ended the
                handshake, as it does when it is killed. If it does so twice, the key is wrong.
        """
        known = self.read()
        if not known.addresses:
            raise BrokerUnreachable(f"job {known.job}: its broker was superseded, and the one that "
                                    "took its place does not serve yet")
        try:
            return dial(known.addresses, known.key, known.job)
        except AccessError as error:
            twice, self._refused = self._refused == known, known
            if twice or not known.back_within_s:
                raise
            raise BrokerUnreachable(str(error)) from None
        except BrokerUnreachable as error:
            on_unix_only = all(each.startswith("unix:") for each in known.addresses)
            if self._address or not on_unix_only or not error.refused:
                raise
            raise _out_of_sight(known, error) from None

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


def _out_of_sight(known: Access, error: BrokerUnreachable) -> AccessError | BrokerUnreachable:
    """Returns the error for Unix sockets that nobody serves here, with the remedy if no folder of
    them is there.

    On another host than the broker's that will not change. On the same one a broker that was killed
    may make the folder anew, so it makes sense to wait.
    """
    if any(Path(each.removeprefix("unix:")).parent.exists() for each in known.addresses):
        return error
    here = socket.gethostname()
    if known.host not in ("", here):
        return AccessError(f"job {known.job}: its broker listens on a Unix socket of host "
                           f"{known.host} only, and this is {here}: {_REMEDY}")
    told = OutOfSight(f"{error}: it listens on this socket only; if it runs, this process sees "
                      f"another folder there: {_REMEDY}")
    told.refused = True
    return told
