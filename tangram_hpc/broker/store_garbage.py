"""Removes entries that clients and idempotency keys leave in the job's store.

A client removes its own entries when it needs them no more. The remaining entries of a client that
has expired are removed here. Entries that are kept for an idempotency key are removed a grace
period after the key was forgotten: until then a client may still read a result whose name it has
received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..protocol.payload import owner_by_client, owner_by_name


class StoreGarbage:
    """Collects owners whose entries are garbage, and removes these entries together.

    Args:
        sweep: begins to remove the entries of all owners whose names begin with one of these texts;
            returns at once.
        now: the broker's time in epoch ns.
        grace_ns: how long the entries of a forgotten key stay.
        in_use: whether a key has been submitted again; its entries are not removed then.
        remembered: whether an expired client is still known, because a session of it is open or an
            action of it has not ended. Its entries stay until it is not.
    """

    def __init__(self, sweep: Callable[[list[str]], None], now: Callable[[], int],
                 grace_ns: int, in_use: Callable[[str], bool],
                 remembered: Callable[[int], bool]) -> None:
        self._sweep, self._now, self._grace_ns, self._in_use = sweep, now, grace_ns, in_use
        self._remembered = remembered
        self._expired: list[int] = []  # clients whose entries were not removed yet
        self._forgotten: list[tuple[int, str]] = []  # (when, key), oldest first

    def client_expired(self, client: int) -> None:
        """Marks the entries of a client that has expired as garbage. They are removed once the
        client's last session is closed."""
        self._expired.append(client)

    def forgotten(self, names: Iterable[str]) -> None:
        """Marks the entries of idempotency keys as garbage under which nothing is kept any more."""
        now = self._now()
        self._forgotten += [(now, name) for name in names]

    def watch(self) -> None:
        """Removes all entries whose grace period is over; called every few seconds."""
        gone = [client for client in self._expired if not self._remembered(client)]
        self._expired = [client for client in self._expired if self._remembered(client)]
        owners = [owner_by_client(client) for client in gone]
        until, due = self._now() - self._grace_ns, 0
        while due < len(self._forgotten) and self._forgotten[due][0] <= until:
            due += 1
        owners += [owner_by_name(name) for _, name in self._forgotten[:due]
                   if not self._in_use(name)]
        del self._forgotten[:due]
        if owners:
            self._sweep(owners)
