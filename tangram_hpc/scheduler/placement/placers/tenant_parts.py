"""Tells which part of a node's CPUs each tenant may count on, and keeps what it may need soon.
Pure.

Problem. Units that a tenant does not want go to others. An action that can be resized gives them
back at once; any other holds them until it ends. So a tenant with short actions and pauses between
them waited at each turn for the end of another tenant's long one: up to 20 times as long as on a
cluster that is only its part.

Idea. A tenant's *part* of a node is what its shares make of the CPUs, among the tenants that use
the node or wait for it. As many units of its part as a tenant held lately, less those that it holds
now, are *kept* for it. Resizable actions may grow into kept units, as they give them back at once.
Another action starts only beside them, unless one of these holds:

- It is expected to run for HORIZON_NS at most.
- Its tenant has room in its own part. What the tenant's resizable actions can give back is room.
- Its tenant is behind the one for which they are kept, in the order of tenants.
- It needs more units than its tenant's part, and has waited for as long as it will run.

So a tenant that was silent for twice RECENT_NS has nothing kept, what was lent once is not taken
away, and every action starts in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...state.tenant_use import HORIZON_NS, TenantTurns
from .rigid_sizes import NodeLoad

# What a tenant held counts for this long, and up to twice as long. On drawn loads
# (bench_drawn_tenants) a third of it left more tenants worse off than on their own part, and four
# times as much kept too many units.
RECENT_NS = 30_000_000_000


@dataclass(slots=True)
class _Recent:
    """What a tenant held on a node lately.

    Attributes:
        since: when the present period began, epoch ns. Each lasts for RECENT_NS.
        before: the most CPUs that it held in the period before.
        most: the most that it held in the present period.
        now: what it holds since it was last noted.
    """

    since: int
    before: int = 0
    most: int = 0
    now: int = 0


class RecentUse:
    """Remembers the most CPUs that each tenant held on one node lately."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[str, _Recent] = {}

    def note(self, held: dict[str, int], now: int) -> None:
        """Notes what each tenant holds from `now` on, in epoch ns. O(tenants)."""
        for tenant in dict.fromkeys((*self._of, *held)):
            use = self._of.setdefault(tenant, _Recent(now))
            if (age := now - use.since) >= RECENT_NS:
                use.before = use.most if age < 2 * RECENT_NS else use.now
                use.most, use.since = use.now, now - age % RECENT_NS
            use.now = held.get(tenant, 0)
            use.most = max(use.most, use.now)
            if not use.most and not use.before:
                del self._of[tenant]

    def add(self, tenant: str, units: int, now: int) -> None:
        """Notes `units` more that a tenant holds from `now` on; negative for fewer."""
        use = self._of.setdefault(tenant, _Recent(now))
        use.now += units
        use.most = max(use.most, use.now)

    def most(self) -> dict[str, int]:
        """Returns the most that each tenant held lately; those that held nothing are left out."""
        return {tenant: max(use.before, use.most) for tenant, use in self._of.items()}


@dataclass(slots=True)
class Held:
    """The CPUs that a tenant's leases hold on one node.

    Attributes:
        units: how many they hold.
        solid: how many of these they keep until they end; resizable ones keep one each.
        lately: how many of these count for what the tenant held lately.
    """

    units: int = 0
    solid: int = 0
    lately: int = 0


@dataclass(slots=True)
class _Part:
    """What one tenant may count on, on one node.

    Attributes:
        units: its part of the CPUs.
        free: how many of these its actions did not keep when the pass began.
        room: how many of these it may still give in this pass to actions that keep them.
        kept: how many units are kept for it.
    """

    units: int
    free: int
    room: int
    kept: int


class TenantParts:
    """The parts of one node's tenants during one pass, which draws them down.

    Args:
        cpus: how many CPUs the node offers.
        turns: the order of the tenants.
        held: what the leases of each tenant hold on the node.
        wanting: the tenants whose actions may start on the node.
        recent: what tenants held there lately.
    """

    __slots__ = ("_keep", "_of", "_promised", "_turns", "held_back")

    def __init__(self, cpus: int, turns: TenantTurns, held: dict[str, Held],
                 wanting: Iterable[str], recent: RecentUse) -> None:
        most = recent.most()
        shares = {tenant: turns.shares(tenant)
                  for tenant in dict.fromkeys((*most, *held, *wanting))}
        total, nothing = sum(shares.values()), Held()
        self._turns = turns
        self._of: dict[str, _Part] = {}
        for tenant, each in shares.items():
            has, part = held.get(tenant, nothing), cpus * each // total
            kept = min(part, most.get(tenant, 0)) - has.units
            self._of[tenant] = _Part(part, part - has.solid, part - has.solid,
                                     max(0, min(kept, turns.room(tenant))))
        self._keep = {tenant: part for tenant, part in self._of.items() if part.kept}
        self._promised = 0  # units into which actions that were chosen may still grow
        self.held_back = 0  # actions that were told to leave units to other tenants

    @property
    def keep(self) -> bool:
        """Whether units are kept for any tenant."""
        return bool(self._keep)

    def load(self, tenant: str, present: int, waiting: int, spare: int) -> NodeLoad | None:
        """Returns the load of a tenant's part with its own actions; None if no other tenant uses
        the node.

        Args:
            tenant: the tenant.
            present: how many of its actions run or wait for CPUs on the node.
            waiting: how many of them wait.
            spare: units of the node that are free or could be taken.
        """
        part = self._of[tenant]
        if len(self._of) == 1 or not part.units:
            return None
        return NodeLoad(part.units, max(0, min(part.free, spare)), present, waiting)

    def most(self, tenant: str, least: int, run_ns: int, spare: int, waited_ns: int) -> int:
        """Returns how many units an action may take; fewer than `least` if it may not start.
        O(tenants for which units are kept).

        Args:
            tenant: the tenant of the action.
            least: the fewest units on which it can start.
            run_ns: how long it is expected to run on them.
            spare: units that are free or could be taken.
            waited_ns: how long it has waited.
        """
        if run_ns <= HORIZON_NS:
            return spare
        part = self._of[tenant]
        if least > part.units and waited_ns >= run_ns:
            return spare
        rank = self._turns.rank(tenant, least)
        kept = sum(other.kept for name, other in self._keep.items()
                   if name != tenant and other.kept and self._turns.rank(name) <= rank)
        if not kept:
            return spare
        most = max(spare - kept - self._promised, min(spare, part.room))
        self.held_back += most < least
        return most

    def choose(self, tenant: str, least: int, most: int) -> None:
        """Counts an action that was chosen to start on `least` units at least, and that may keep up
        to `most`.
        """
        part = self._of[tenant]
        part.room -= most
        part.kept = max(0, part.kept - least)
        self._promised += most - least
