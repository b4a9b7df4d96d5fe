"""Keeps the concurrent calls of an endpoint, and the memory of sessions, for the tenants that used
them lately. Pure.

Calls and sessions give nothing back before they end. So the rules are those for rigid actions on
CPUs (`tenant_parts`).
"""

from __future__ import annotations

from ...state.tenant_use import TenantTurns
from .recent_use import RecentUse
from .tenant_parts import Held, TenantParts


class KeptUnits:
    """The units that are kept during one cycle, which draws them down.

    Args:
        units: how many there are.
        free: how many of these are free.
        turns: the order of the tenants in this resource, which knows what they hold.
        recent: what tenants held lately; what they hold now is noted there.
        now: the present time, epoch ns.
    """

    def __init__(self, units: int, free: int, turns: TenantTurns, recent: RecentUse, now: int
                 ) -> None:
        present = turns.present()
        held = {tenant: some for tenant in present if (some := turns.held(tenant))}
        recent.note(held, now, turns.changed_at)
        self._free, self._recent, self._now = free, recent, now
        self._parts = TenantParts(units, turns, {tenant: Held(some, some)
                                                 for tenant, some in held.items()},
                                  present, recent)

    @property
    def held_back(self) -> int:
        """How many actions or sessions were told to leave units to other tenants."""
        return self._parts.held_back

    def may_take(self, tenant: str, units: int, run_ns: int, waited_ns: int) -> bool:
        """Returns whether a tenant may take so many units beside those that are kept. They need not
        be free yet: for a large session the caller lets memory gather.

        Args:
            tenant: the tenant.
            units: how many it wants.
            run_ns: for how long it is expected to hold them.
            waited_ns: how long it has waited for them.
        """
        return not units or not self._parts.keep or self._parts.most(
            tenant, units, run_ns, max(units, self._free), waited_ns) >= units

    def take(self, tenant: str, units: int) -> None:
        """Counts units that a tenant takes in this cycle."""
        self._free -= units
        self._parts.choose(tenant, units, units)
        self._recent.add(tenant, units, self._now)
