"""Tells which part of the units of one place each tenant may count on, and keeps what it may need
soon. A place is a node with its CPUs, an endpoint with its concurrent calls, or all nodes with
their memory. Pure.

Problem. Units that a tenant does not want go to others. An action that can be resized gives them
back at once; any other holds them until it ends. So a tenant with short actions and pauses between
them waited at each turn for the end of another tenant's long one: up to 20 times as long as on a
cluster that is only its part.

Idea. A tenant's *part* of a node is what its shares make of the CPUs, among the tenants that use
the node or wait for it. As many units of its part as a tenant held lately, less those that it holds
now, are *kept* for it. What lately means depends on the action that would take the units: within
AWAY times its run time, rounded up to one of PERIODS_NS, or within the longest of these (both are
in `recent_use.py`). A tenant that has been away for that long will hardly come back before a short
action ends. Resizable actions may grow into kept units, as they give them back at once. Another
action starts only beside them, unless one of these holds:

- It is expected to run for HORIZON_NS at most.
- Its tenant has room in its own part. What the tenant's resizable actions can give back is room.
- When it ends its tenant will still be behind the one for which they are kept, in the order of
  tenants.
- It needs more units than its tenant's part, and has waited for as long as it will run.

So a tenant that was silent for twice the longest period has nothing kept, what was lent once is not
taken away, and every action starts in the end.

Calls of endpoints and sessions give nothing back before they end, so for concurrent calls and
memory the same rules hold as for rigid actions (`kept_units`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...state.tenant_use import HORIZON_NS, TenantTurns
from .cpus.rigid_sizes import NodeLoad
from .recent_use import PERIODS_NS, RecentUse, period_for

BALANCE_NS = 250_000_000  # after this time tenants are compared again


@dataclass(slots=True)
class Held:
    """The units that a tenant holds in one place.

    Attributes:
        units: how many it holds.
        solid: how many of these its actions keep until they end; resizable ones keep one each.
        lately: how many of these count for what the tenant held lately.
    """

    units: int = 0
    solid: int = 0
    lately: int = 0


@dataclass(slots=True)
class _Part:
    """What one tenant may count on in one place.

    Attributes:
        units: its part of the units.
        free: how many of these its actions did not keep when the pass began.
        room: how many of these it may still give in this pass to actions that keep them.
        lately: the most units of its part that it held lately, by period.
        has: how many units it holds.
        allowed: how many more units its limit allows.
    """

    units: int
    free: int
    room: int
    lately: list[int]
    has: int
    allowed: int

    def kept(self, period: int = -1) -> int:
        """Returns how many units are kept for it from actions for which this period counts."""
        return max(0, min(self.lately[period] - self.has, self.allowed))


class TenantParts:
    """The parts of the tenants of one place during one pass, which draws them down.

    Args:
        units: how many units the place has.
        turns: the order of the tenants.
        held: what each tenant holds of these.
        wanting: the tenants whose actions may start there.
        recent: what tenants held there lately.
    """

    __slots__ = ("_keep", "_of", "_promised", "_turns", "held_back")

    def __init__(self, units: int, turns: TenantTurns, held: dict[str, Held],
                 wanting: Iterable[str], recent: RecentUse) -> None:
        shares = {tenant: turns.shares(tenant)
                  for tenant in dict.fromkeys((*recent.tenants(), *held, *wanting))}
        total, nothing = sum(shares.values()), Held()
        self._turns = turns
        self._of: dict[str, _Part] = {}
        for tenant, each in shares.items():
            has, part = held.get(tenant, nothing), units * each // total
            lately = [min(part, recent.most(tenant, k)) for k in range(len(PERIODS_NS))]
            self._of[tenant] = _Part(part, part - has.solid, part - has.solid, lately, has.units,
                                     turns.room(tenant))
        self._keep = {tenant: part for tenant, part in self._of.items() if part.kept()}
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
        # The rank that the tenant will have when the action ends: `rank` counts each further unit
        # for HORIZON_NS.
        rank, period = self._turns.rank(tenant, least * run_ns // HORIZON_NS), period_for(run_ns)
        kept = sum(units for name, other in self._keep.items()
                   if name != tenant and (units := other.kept(period))
                   and self._turns.rank(name) <= rank)
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
        part.has, part.allowed = part.has + least, part.allowed - least
        self._promised += most - least
