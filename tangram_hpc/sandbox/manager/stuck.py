"""Owns: noticing runners that are long at one call while others wait behind it. Must not know what
is done about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .hosts import Host

STUCK_S = 0.05


class StuckWatch:
    """Calls `free` with each watched runner that is at the same call for STUCK_S or longer."""

    def __init__(self, free: Callable[[Host], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = free
        self._at: dict[int, tuple[Host, int]] = {}  # by number: the lease each was at

    def watch(self, host: Host) -> None:
        """Calls wait in this runner from now on."""
        if not self._at:
            self._loop.call_later(STUCK_S, self._tick)
        self._at.setdefault(host.number, (host, 0))

    def _tick(self) -> None:
        watched, self._at = self._at, {}
        for number, (host, was) in watched.items():
            first = next(iter(host.leases), 0)
            if first and first == was:
                self._free(host)
            if len(host.leases) > 1:
                self._at[number] = host, first
        if self._at:
            self._loop.call_later(STUCK_S, self._tick)
