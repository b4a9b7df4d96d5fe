"""Pure. Fair sharing: the order between clients, and between the trajectories of one client.

Problem. In plain order of arrival, all other clients wait for each of one client's 300,000 actions,
and all other trajectories of a client wait for each of one trajectory's 2,000.

Idea: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), in which each action costs the
same, in three levels. Each pool of units keeps its own virtual time. Where a broker has several
tenants, `tenant_use` says which of them is next, and the levels below order its actions alone.
1. Between clients. A client's next action has a start tag; the client with the lowest one is next.
A grant adds 1 to the tag of its client, and the pool's virtual time becomes the tag that was
served. A client that comes to wait, or that could not be served for a while, has at least that time
for its tag, so no client saves up service.
2. Between the two groups of one client: actions without a trajectory, and all others. A group has
tags in the same way. While neither group is more than BURST grants ahead of the other, their
actions are served in their own order, as if they were one group; then the one that is behind comes
first. So neither a burst of single actions nor many sessions shut out the other group.
3. Between the trajectories of one client. A trajectory (the action's `trajectory`, else its
session) that has been given more than BURST grants beyond the client's virtual time waits for later
rounds. Its round is part of its action's order tag, which is drawn once and never changes.
Trajectories that have a few actions each are served in their own order, as if nothing were counted.

A grant may come back without having begun (`LeaseReturned`). Its action then waits again under its
old order tag, and its next grant is not counted again, because the client did not use the one that
was counted. (To take the count back when the lease returns would not do. A start tag that lies
behind the virtual time is forgotten, and with it all but one of several grants that come back
together.)

Invariants: everything here follows from the events of the ledger alone, in their order, so a replay
and the simulator agree. An action waits for a bounded number of later ones of other clients and
trajectories. Memory is bounded by the number of waiting actions, as an empty pool forgets its
counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from ...domain.action import Action
from .tenant_use import Tenants, TenantTurns, TenantUse

BURST = 16  # how many grants a trajectory or group may be ahead of others
SINGLE, TRAJECTORY = 0, 1  # groups of a client's actions
_SEQUENCE = 44  # low bits of an order tag: order of arrival; the bits above: the round
_KEEP = 1024  # trajectories or clients that are kept without waiting actions
# Bits that say on which levels an action was counted. The bits from _FORGOTTEN on hold how often
# its pool had forgotten its counts by then: an action whose count was forgotten is counted again.
_CLIENT, _GROUP, _FORGOTTEN = 1, 2, 2


def trajectory_of(action: Action) -> str | int:
    """The name or session of the trajectory that an action belongs to; 0 for none."""
    if action.turn is not None:
        return action.turn.trajectory
    return action.trajectory or action.session


def arrival_of(order_tag: int) -> int:
    """The place of an action in the order in which actions came to wait."""
    return order_tag & (1 << _SEQUENCE) - 1


def round_of(order_tag: int) -> int:
    """The round of its client's trajectories in which an action is served."""
    return order_tag >> _SEQUENCE


class ClientShare:
    """One client's grants in one pool, counted while other actions wait there.

    Attributes:
        client: its number.
        tenant: the tenant that it belongs to.
        pool: the pool's shares.
        use: what that tenant uses of the pool's units; None before the first action waits.
        tag: the start tag of its next action.
        groups: the start tags of its two groups.
        group_time: the tag of the group that was served last.
        round: the highest round that was served, which is the virtual time of its trajectories.
        ends: for each trajectory that is ahead of `round`, the round after its last drawn one.
        counted: on which levels a waiting action was counted already, if its grant came back.
        waiting: how many actions wait, for each group.
    """

    __slots__ = ("client", "counted", "ends", "group_time", "groups", "pool", "round", "tag",
                 "tenant", "use", "waiting")

    def __init__(self, client: int, pool: PoolShares) -> None:
        self.client, self.pool, self.tag = client, pool, pool.time
        self.tenant = pool.tenants.tenant_of(client)
        self.use: TenantUse | None = None
        self.groups, self.group_time = [0, 0], 0
        self.round = pool.last_round
        self.ends: dict[str | int, int] = {}
        self.counted: dict[int, int] = {}
        self.waiting = [0, 0]

    def wait(self, group: int) -> None:
        """Counts an action of a group that begins to wait."""
        pool, use = self.pool, self.use
        if use is None:
            use = self.use = pool.use.of(self.tenant)
        self.waiting[group] += 1
        pool.waiting += 1
        pool.use.wait(use)

    def leave(self, group: int) -> None:
        """Counts an action of a group that waits no more, and forgets what is no longer needed."""
        pool, use = self.pool, self.use
        assert use is not None
        self.waiting[group] -= 1
        pool.waiting -= 1
        pool.use.leave(use)
        if not self.waiting[group]:
            pool.group_emptied(self)

    def start(self) -> int:
        """The start tag of its next action, which is at least the pool's virtual time."""
        return max(self.tag, self.pool.time)

    def start_of(self, group: int) -> int:
        """The start tag of a group's next action, which is at most BURST behind the group time."""
        return max(self.groups[group], self.group_time - BURST)

    def draw(self, trajectory: str | int, sequence: int) -> int:
        """The order tag of an action of a trajectory. O(1) amortised.

        Args:
            trajectory: its name or session.
            sequence: the action's place in order of arrival.
        """
        now, ends = self.round, self.ends
        end = max(now, ends.get(trajectory, 0))
        ends[trajectory] = end + 1
        if len(ends) > _KEEP + 2 * self.waiting[TRAJECTORY]:
            self._forget()
        found = max(now, end - BURST)
        if found > self.pool.last_round:
            self.pool.last_round = found
        return found << _SEQUENCE | sequence

    def _forget(self) -> None:
        """Forgets the half of the trajectories that are least ahead of `round`; this hardly changes
        their order tags.
        """
        # The sort is stable: oldest first.
        ahead = sorted(self.ends.items(), key=lambda end: -end[1])
        self.ends = {each: at for each, at in ahead[:len(ahead) // 2] if at > self.round}

    def returned(self, action: int, counted: int) -> None:
        """Takes back an action whose grant came back without having begun. `counted` is what
        `served` returned for that grant.
        """
        if counted >> _FORGOTTEN == self.pool.forgotten:
            self.counted[action] = counted

    def served(self, group: int, order_tag: int, action: int) -> int:
        """Counts a grant of units to one of the client's actions, on each level on which the action
        was not counted before. The client's tag does not change while it is the only client of its
        pool. A group's tag does not change while no action of the other group waits. Returns the
        levels on which the action is counted now, which `returned` needs.
        """
        pool = self.pool
        counted = self.counted.pop(action, 0) if self.counted else 0
        if len(pool.clients) > 1 and not counted & _CLIENT:
            pool.time = self.start()
            self.tag = pool.time + 1
            counted |= _CLIENT
        if self.waiting[1 - group] and not counted & _GROUP:
            start = self.start_of(group)
            self.group_time = max(self.group_time, start)
            self.groups[group] = start + 1
            counted |= _GROUP
        if group == TRAJECTORY:
            self.round = max(self.round, order_tag >> _SEQUENCE)
        return counted | pool.forgotten << _FORGOTTEN


class PoolShares:
    """The shares of clients in one pool. They are kept until no client waits for the pool's units.

    Attributes:
        tenants: says which tenant a client belongs to.
        use: what each tenant uses of the pool's units.
        time: the pool's virtual time, the start tag of the client that was served last.
        last_round: the highest round ever drawn here; a client that comes later begins with it, so
            that rounds of one client never go back.
        clients: shares by client.
        waiting: how many actions wait.
        forgotten: how often the pool was empty and forgot its counts.
    """

    __slots__ = ("clients", "forgotten", "last_round", "tenants", "time", "use", "waiting")

    def __init__(self, tenants: Tenants, resource: str) -> None:
        self.tenants, self.use = tenants, tenants.use(resource)
        self.time = self.last_round = self.waiting = self.forgotten = 0
        self.clients: dict[int, ClientShare] = {}

    def of(self, client: int) -> ClientShare:
        """The share of a client; made if there is none."""
        share = self.clients.get(client)
        if share is None:
            share = self.clients[client] = ClientShare(client, self)
        return share

    def group_emptied(self, share: ClientShare) -> None:
        """Forgets counts that are no longer needed, after the last waiting action of a client's
        group has left.
        """
        if not self.waiting:
            self.clients.clear()
            self.forgotten += 1
        elif len(self.clients) > _KEEP and not any(share.waiting):
            del self.clients[share.client]


class Ordered(Protocol):
    """A list of waiting actions of one client and group, as the placer sorts them."""

    def head(self) -> object | None:
        """The first action that is left; None at the end."""
        ...

    def rank(self) -> tuple[int, int]:
        """The place of the first remaining action: by the placer's order, then by arrival.

        Both lists of a client rank in the same way, and the list with the lower rank comes first.
        """
        ...


_W = TypeVar("_W", bound=Ordered)


class Rounds(Generic[_W]):
    """The lists of several clients and groups in the order of one pass; changes no share.

    Each list must be at its first action. A step costs O(log tenants + log clients).

    Args:
        lists: the share of each list's client, its group, and the list.
        turns: the order of the tenants; None if there is only one.

    Attributes:
        several: whether more than one client waits.
    """

    __slots__ = ("_groups", "_heap", "_heaps", "_ranks", "_served", "_turns", "several")

    def __init__(self, lists: Iterable[tuple[ClientShare, int, _W]],
                 turns: TenantTurns | None = None) -> None:
        # by client: (start tag, list) of each group whose list is not at its end
        self._groups: dict[int, list[tuple[int, _W]]] = {}
        self._heaps: dict[str, list[tuple[int, int]]] = {}  # tenant -> heap of (start tag, client)
        self._served: set[int] = set()
        self._turns = turns
        for share, group, each in lists:
            groups = self._groups.get(share.client)
            if groups is None:
                groups = self._groups[share.client] = []
                tenant = share.tenant if turns is not None else ""
                self._heaps.setdefault(tenant, []).append((share.start(), share.client))
            groups.append((share.start_of(group), each))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._heap = next(iter(self._heaps.values()), [])  # of the tenant that is next
        # tenants by rank; an entry may be too low, since ranks grow as units are granted
        self._ranks = [turns.rank(tenant) for tenant in self._heaps] if turns is not None else []
        heapq.heapify(self._ranks)
        self.several = len(self._groups) > 1

    def current(self) -> _W | None:
        """The list that is served next; None when all are at their ends. It stays the one that
        `is_first` and `charge` are about until the next call.
        """
        while self._heaps:
            heap = self._heap = self._next_heap()
            while heap:
                groups = [g for g in self._groups[heap[0][1]] if g[1].head() is not None]
                self._groups[heap[0][1]] = groups
                if groups:
                    if len(groups) > 1 and _second_is_next(groups[0], groups[1]):
                        groups.reverse()
                    return groups[0][1]
                heapq.heappop(heap)
            self._heaps = {tenant: each for tenant, each in self._heaps.items() if each}
            if self._ranks:
                heapq.heappop(self._ranks)
        return None

    def _next_heap(self) -> list[tuple[int, int]]:
        """Returns the clients of the tenant that is next."""
        ranks, turns = self._ranks, self._turns
        if turns is None:
            return self._heap
        while (now := turns.rank(ranks[0][2])) != ranks[0]:
            heapq.heapreplace(ranks, now)
        return self._heaps[ranks[0][2]]

    def is_first(self) -> bool:
        """Whether the client that is served next has not been served in this pass."""
        return self._heap[0][1] not in self._served

    def charge(self, counted: int = 0) -> None:
        """Counts one grant for the current list, except on the levels on which its action was
        counted before (`ClientShare.counted`). The placer charges the units to the tenant
        (`TenantTurns.charge`).
        """
        tag, client = self._heap[0]
        self._served.add(client)
        start, each = self._groups[client][0]
        self._groups[client][0] = (start + (not counted & _GROUP), each)
        heapq.heapreplace(self._heap, (tag + (not counted & _CLIENT), client))


def _second_is_next(first: tuple[int, Ordered], second: tuple[int, Ordered]) -> bool:
    """Which of a client's two groups is next: the one that is more than BURST grants behind, else
    the one whose first action is before the other's.
    """
    if abs(first[0] - second[0]) > BURST:
        return second[0] < first[0]
    return second[1].rank() < first[1].rank()
