"""What clients and named actions leave in the job's store, and when it is removed.

A client removes its entries itself when it needs them no more. What a client that is gone left
there is removed when it has expired; what is kept for an action's name, a grace after that name was
forgotten: until then a client may still be about to read a result that it was told of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..protocol.payload import owner_by_client, owner_by_name


class Sweeping:
    """Collects owners, and has all of their entries removed at once.

    Args:
        sweep: removes the entries of owners that begin with one of these; does not wait.
        now: the broker's time in ns.
        grace_ns: how long the entries of a forgotten name stay.
        in_use: whether a name has been submitted again; then its entries are not removed.
    """

    def __init__(self, sweep: Callable[[list[str]], None], now: Callable[[], int],
                 grace_ns: int, in_use: Callable[[str], bool]) -> None:
        self._sweep, self._now, self._grace_ns, self._in_use = sweep, now, grace_ns, in_use
        self._left: list[str] = []
        self._forgotten: list[tuple[int, str]] = []  # (since, name), oldest first

    def left(self, client: int) -> None:
        """A client has expired."""
        self._left.append(owner_by_client(client))

    def forgotten(self, names: Iterable[str]) -> None:
        """Nothing is kept under these names any more."""
        now = self._now()
        self._forgotten += [(now, name) for name in names]

    def watch(self) -> None:
        """Called every few seconds."""
        owners, self._left = self._left, []
        until, due = self._now() - self._grace_ns, 0
        while due < len(self._forgotten) and self._forgotten[due][0] <= until:
            due += 1
        owners += [owner_by_name(name) for _, name in self._forgotten[:due]
                   if not self._in_use(name)]
        del self._forgotten[:due]
        if owners:
            self._sweep(owners)
