"""Pure. The sessions that wait to be placed, and the order in which placers look at them.

Problem: in plain order of arrival a client that requests 2,000 sessions makes another client's one
session wait behind all of them.

Idea: the same start-time fair queueing as in `fair_order`, between clients, with each session
counting as one; within a client the order is that of arrival. (A session is a trajectory of its own
and opens once, so there is no level below.) Between tenants, memory counts (`tenant_use`). Among
clients with the same start tag, the one whose
first session has waited longest comes first.

Invariants: the order follows from the events of the ledger alone. A session that finds no room
keeps a node from all sessions behind it (`placers.session_openings`). The start tag of its client
stands still meanwhile, while those of others grow. So on the node that is kept, each other client
opens at most one session before the one that waits, however large that one is. For a single client
the order is that of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator

from ...domain.ids import client_of
from .fair_order import TRAJECTORY, PoolShares
from .tenant_use import MEMORY, Tenants, TenantTurns


class SessionQueue:
    """The waiting sessions of each client.

    Adding and removing a session costs O(1). A walk costs O(clients) at its start and O(log
    clients) a step; the queue must not change during it.
    """

    __slots__ = ("_arrivals", "_by_client", "_shares")

    def __init__(self, tenants: Tenants) -> None:
        self._arrivals = 0
        self._by_client: dict[int, dict[int, int]] = {}  # client -> session -> arrival, in order
        self._shares = PoolShares(tenants, MEMORY)

    def __len__(self) -> int:
        return self._shares.waiting

    def __contains__(self, session: int) -> bool:
        return session in self._by_client.get(client_of(session), ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionQueue) and list(self) == list(other)

    def add(self, session: int) -> None:
        """Adds a session that waits to be placed, behind all others of its client."""
        self._arrivals += 1
        client = client_of(session)
        self._by_client.setdefault(client, {})[session] = self._arrivals
        self._shares.of(client).wait(TRAJECTORY)

    def placed(self, session: int) -> None:
        """Removes a session that was placed, and counts it for its client."""
        self._shares.of(client_of(session)).served(TRAJECTORY, 0, session)
        self.drop(session)

    def drop(self, session: int) -> None:
        """Removes a session that does not wait any more, without counting it."""
        client, share = client_of(session), self._shares.of(client_of(session))
        del self._by_client[client][session]
        if not self._by_client[client]:
            del self._by_client[client]
        share.leave(TRAJECTORY)

    def __iter__(self) -> Iterator[int]:
        """Yields the sessions in the order of their clients; tenants are not compared."""
        return self._merged(self._by_client)

    def walk(self, turns: TenantTurns | None, mem_mib: Callable[[int], int],
             left_out: Collection[str] = ()) -> Iterator[int]:
        """Yields the sessions in the order in which placers look at them, as if each one were
        placed in turn.

        Args:
            turns: the order of the tenants in memory, which is drawn down; None if there is nothing
                to compare. Limits are not looked at.
            mem_mib: gives the memory of a session.
            left_out: tenants whose sessions are passed over; it may grow during the walk.
        """
        if turns is None:
            yield from self
            return
        of_tenant: dict[str, list[int]] = {}
        for client in self._by_client:
            of_tenant.setdefault(self._shares.of(client).tenant, []).append(client)
        left = {tenant: self._merged(clients) for tenant, clients in of_tenant.items()}
        while left:
            tenant = min(left, key=turns.rank)
            session = next(left[tenant], 0) if tenant not in left_out else 0
            if not session:
                del left[tenant]
                continue
            yield session
            turns.charge(tenant, mem_mib(session))

    def _merged(self, clients: Collection[int]) -> Iterator[int]:
        """Yields the sessions of some clients in the order of their start tags."""
        if len(clients) < 2:
            for client in clients:
                yield from self._by_client[client]
            return
        # (start tag, arrival, session, the sessions of its client behind it)
        heads: list[tuple[int, int, int, Iterator[tuple[int, int]]]] = []
        for client in clients:
            rest = iter(self._by_client[client].items())
            session, arrival = next(rest)
            heads.append((self._shares.of(client).start(), arrival, session, rest))
        heapq.heapify(heads)
        while heads:
            tag, _, session, rest = heads[0]
            yield session
            behind = next(rest, None)
            if behind is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (tag + 1, behind[1], behind[0], rest))
