"""Options and time limits of all connections. No event loop is imported here, since a process that
only dials needs none.
"""

from __future__ import annotations

import socket

HANDSHAKE_S = 5.0  # how long the mutual challenge may take
TCP_TIMEOUT_S = 30.0  # equal to the broker's limit for a silent worker


def tune(sock: socket.socket) -> None:
    """Sets TCP options, so that small frames leave at once and a vanished host is noticed.

    If a host vanishes without closing its connections (power, cable), the connection ends after
    `TCP_TIMEOUT_S`; by default the kernel would try for a quarter of an hour.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_TIMEOUT_S * 1000))
