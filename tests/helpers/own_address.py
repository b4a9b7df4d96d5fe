"""An address of this machine by which its other services could be reached."""

from __future__ import annotations

import socket


def own_address(otherwise: str) -> str:
    """An address of this machine that is not its loopback; `otherwise` where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return otherwise
        return str(probe.getsockname()[0])
