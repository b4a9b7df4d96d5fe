"""Pure. Leases that a worker was given ahead of time: each begins when the one before it is gone.

The queues hold `StartAttempt` orders and know nothing of time or processes. An order leaves its
queue exactly once: to begin, because its lease was killed, or to be returned to the broker.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.message import StartAttempt

WaitingStart = tuple[StartAttempt, "memoryview | None"]  # the order and its payload


class LeaseQueues:
    """Orders by the lease that each waits for."""

    def __init__(self) -> None:
        self._behind: dict[int, WaitingStart] = {}  # by the lease in front
        self._before: dict[int, int] = {}  # waiting lease -> the lease in front of it
        self._watched: set[int] = set()  # leases that headed a queue at the last call of `stuck`

    def __len__(self) -> int:
        return len(self._before)

    def __contains__(self, lease: object) -> bool:
        return lease in self._before

    def hold(self, order: StartAttempt, payload: memoryview | None) -> None:
        """Keeps an order until the lease `order.after` is gone."""
        self._behind[order.after] = order, payload
        self._before[order.lease] = order.after

    def gone(self, lease: int) -> WaitingStart | None:
        """Removes and returns the order that may begin now that this lease is gone."""
        waiting = self._behind.pop(lease, None)
        if waiting is not None:
            del self._before[waiting[0].lease]
        return waiting

    def drop(self, lease: int) -> None:
        """Removes an order; the order behind it moves up."""
        before, waiting = self._before.pop(lease), self._behind.pop(lease, None)
        del self._behind[before]
        if waiting is not None:
            self._behind[before], self._before[waiting[0].lease] = waiting, before

    def where(self, true: Callable[[StartAttempt], bool]) -> list[int]:
        """Returns the waiting leases whose orders satisfy a predicate."""
        return [order.lease for order, _ in self._behind.values() if true(order)]

    def stuck(self) -> list[int]:
        """Returns the leases that wait behind one which headed its queue at the last call too;
        within a queue the last lease comes first."""
        heads = {before for before in self._behind if before not in self._before}
        found: list[int] = []
        for head in heads & self._watched:
            found += self.behind(head)
        self._watched = heads
        return found

    def behind(self, lease: int) -> list[int]:
        """Returns the leases that wait behind one; the last comes first."""
        queue: list[int] = []
        while (waiting := self._behind.get(lease)) is not None:
            lease = waiting[0].lease
            queue.append(lease)
        return queue[::-1]
