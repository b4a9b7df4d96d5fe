"""Keeps which prefetched lease waits behind which other lease. Pure.

A prefetched lease (`LeaseGranted.after`) begins when the lease in front of it is gone. If a lease
is gone before it began, the lease behind it moves up. Records of actions and the usage of
allocations both count a lease from its beginning, and ask here when that is.
"""

from __future__ import annotations

from ..domain import event as ev


class PrefetchedLeases:
    """The grants of leases that have not begun."""

    def __init__(self) -> None:
        self._behind: dict[int, ev.LeaseGranted] = {}  # by the lease in front
        self._in_front: dict[int, int] = {}  # waiting lease -> the lease in front of it

    def add(self, grant: ev.LeaseGranted) -> None:
        """Adds a lease that waits behind `grant.after`."""
        self._behind[grant.after], self._in_front[grant.lease] = grant, grant.after

    def get(self, lease: int) -> ev.LeaseGranted | None:
        """Returns the grant of a lease that waits; None for any other lease."""
        return self._behind.get(self._in_front.get(lease, 0))

    def remove(self, lease: int) -> ev.LeaseGranted | None:
        """Takes out a lease that is gone, and returns the grant that begins now, if there is one.
        O(1)."""
        behind, in_front = self._behind.pop(lease, None), self._in_front.pop(lease, 0)
        if not in_front:
            if behind is not None:
                del self._in_front[behind.lease]
            return behind
        if behind is None:
            del self._behind[in_front]
        else:
            self._behind[in_front], self._in_front[behind.lease] = behind, in_front
        return None
