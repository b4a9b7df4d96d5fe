"""Keeps which prefetched lease waits behind which other lease. Pure.

A prefetched lease (`LeaseGranted.after`) begins when the lease in front of it is gone. If a lease
is gone before it began, the lease behind it moves up. The worker keeps its waiting orders in a
`LeaseQueues`. Accounting keeps the grants of leases that have not begun in one, because a lease
counts from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LeaseQueues(Generic[T]):
    """The leases that wait behind others, each with an item that the user of the class chooses. All
    calls but `heads`, `behind` and `items` are O(1)."""

    def __init__(self) -> None:
        self._behind: dict[int, tuple[int, T]] = {}  # lease in front -> waiting lease, its item
        self._in_front: dict[int, int] = {}  # waiting lease -> the lease in front of it

    def __len__(self) -> int:
        return len(self._in_front)

    def __contains__(self, lease: object) -> bool:
        return lease in self._in_front

    def add(self, lease: int, in_front: int, item: T) -> None:
        """Adds a lease that waits behind `in_front`."""
        self._behind[in_front], self._in_front[lease] = (lease, item), in_front

    def get(self, lease: int) -> T | None:
        """Returns the item of a lease that waits; None for any other lease."""
        return self._behind[self._in_front[lease]][1] if lease in self._in_front else None

    def remove(self, lease: int) -> T | None:
        """Takes out a lease that is gone.

        Returns:
            The item of the lease that begins now. None if no lease waited behind `lease`, or if
            `lease` itself waited: then the lease behind it only moves up.
        """
        waiting, in_front = self._behind.pop(lease, None), self._in_front.pop(lease, None)
        if in_front is None:
            if waiting is None:
                return None
            del self._in_front[waiting[0]]
            return waiting[1]
        if waiting is None:
            del self._behind[in_front]
        else:
            self._behind[in_front], self._in_front[waiting[0]] = waiting, in_front
        return None

    def heads(self) -> set[int]:
        """Returns the leases that others wait behind and that do not wait themselves."""
        return {lease for lease in self._behind if lease not in self._in_front}

    def behind(self, lease: int) -> list[int]:
        """Returns the leases that wait behind `lease`; the last comes first."""
        queue: list[int] = []
        while (waiting := self._behind.get(lease)) is not None:
            lease = waiting[0]
            queue.append(lease)
        return queue[::-1]

    def items(self) -> Iterator[tuple[int, T]]:
        """Yields each waiting lease with its item."""
        yield from self._behind.values()
