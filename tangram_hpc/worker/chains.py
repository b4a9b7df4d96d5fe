"""Pure. The leases that a worker was given ahead: each begins when the one before it is gone.

Law: holds orders in their chains and knows nothing of time or processes; an order leaves it exactly
once - to begin, because it was killed, or to be given back.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.message import Start

Held = tuple[Start, "memoryview | None"]


class Chains:
    """Orders by the lease that each waits for."""

    def __init__(self) -> None:
        self._behind: dict[int, Held] = {}  # by the lease before
        self._before: dict[int, int] = {}
        self._watched: set[int] = set()

    def __len__(self) -> int:
        return len(self._before)

    def __contains__(self, lease: object) -> bool:
        return lease in self._before

    def hold(self, order: Start, payload: memoryview | None) -> None:
        """Keeps an order until the lease `order.after` is gone."""
        self._behind[order.after] = order, payload
        self._before[order.lease] = order.after

    def gone(self, lease: int) -> Held | None:
        """The order that may begin now that this lease is gone."""
        held = self._behind.pop(lease, None)
        if held is not None:
            del self._before[held[0].lease]
        return held

    def drop(self, lease: int) -> None:
        """Takes an order out; the one behind it moves up."""
        before, held = self._before.pop(lease), self._behind.pop(lease, None)
        del self._behind[before]
        if held is not None:
            self._behind[before], self._before[held[0].lease] = held, before

    def where(self, true: Callable[[Start], bool]) -> list[int]:
        """The leases held whose orders are such."""
        return [order.lease for order, _ in self._behind.values() if true(order)]

    def stuck(self) -> list[int]:
        """The leases held behind one that was also the first of its chain at the last call; last
        first."""
        roots = {before for before in self._behind if before not in self._before}
        found: list[int] = []
        for root in roots & self._watched:
            found += self.behind(root)
        self._watched = roots
        return found

    def behind(self, lease: int) -> list[int]:
        """The leases held behind one; last first."""
        chain: list[int] = []
        while (held := self._behind.get(lease)) is not None:
            lease = held[0].lease
            chain.append(lease)
        return chain[::-1]
