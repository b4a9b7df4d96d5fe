"""Tells which GPUs each tenant may count on, and whose copies may be parked for its calls. Pure.

Problem. A copy that is idle for a moment was parked for any call that gained more than the copy's
own service lost. So a tenant with few calls lost its copies to a tenant with many, and nearly each
of its calls waited for a restore: up to ten times as long as on a cluster that is only its part.

Idea. A tenant *holds* the GPUs that its leases hold, and those of the idle copies that ran one of
its calls within the last `horizon_ns`, while it has a client. Its *part* is what its shares make of
all GPUs that are up, among the tenants that hold GPUs or wait for some, and at most its limit.

- *Kept copies.* An idle copy of a tenant that holds no more than its part is not parked for a call
  of another tenant that would then hold more than its own part. A call that needs more GPUs than
  its tenant's part may park it.
- *Claims.* A tenant that stays within its part with one more block may take a copy of a tenant that
  still has its part without it, although calls wait for that copy. What the other tenant loses does
  not count. Nobody claims anything for a kind of call of which another tenant's copy can serve it:
  tenants that share a service take turns on its copies.

A tenant of a higher priority may park kept copies, and nobody has a claim to its copies. A copy on
which no tenant has run a call belongs to nobody. In the end every call is served, since a call that
no copy can serve takes kept copies too, after KEPT_LIMITS starvation limits (`elastic_gpus`).
"""

from __future__ import annotations

from ...state.demand import horizon_ns
from ...state.ledger import Ledger
from ...state.tenant_use import TenantTurns
from .copy_map import CopyMap, PlacedCopy


class GpuParts:
    """The parts of all tenants during one cycle. Built in O(copies + tenants + clients).

    Args:
        ledger: knows the services.
        copies: the copies on the GPUs, as the cycle draws them down.
        turns: the order of the tenants, which counts what they are given in this cycle.
        now: the present time, epoch ns.
    """

    def __init__(self, ledger: Ledger, copies: CopyMap, turns: TenantTurns, now: int) -> None:
        self._ledger, self._turns, self._now = ledger, turns, now
        self._clients = {turns.tenant_of(client) for client in ledger.clients}
        self._idle: dict[str, int] = {}  # GPUs of the idle copies that a tenant holds
        for copy in (copy for some in copies.of.values() for copy in some):
            if copies.is_idle(copy) and self._is_held(copy):
                self._idle[copy.tenant] = self._idle.get(copy.tenant, 0) + copy.size
        shares = {tenant: turns.shares(tenant)
                  for tenant in dict.fromkeys((*turns.present(), *self._idle))}
        total = max(1, sum(shares.values()))
        self._part = {tenant: min(copies.total * each // total, turns.limit(tenant))
                      for tenant, each in shares.items()}

    @property
    def several(self) -> bool:
        """Whether more than one tenant holds GPUs or waits for some."""
        return len(self._part) > 1

    def is_behind(self, tenant: str, more: int) -> bool:
        """Returns whether a tenant stays within its part with `more` GPUs in addition."""
        return self._holds(tenant) + more <= self._part.get(tenant, 0)

    def keeps(self, copy: PlacedCopy, tenant: str, least: int) -> bool:
        """Returns whether an idle copy is kept from a call of this tenant that needs `least` GPUs.
        """
        owner = copy.tenant
        if owner == tenant or not self._is_held(copy):
            return False
        if self._turns.priority(tenant) > self._turns.priority(owner):
            return False
        if least > self._part.get(tenant, 0) or self.is_behind(tenant, least):
            return False
        return self._holds(owner) <= self._part[owner]

    def has_claim(self, copy: PlacedCopy, tenant: str) -> bool:
        """Returns whether a tenant that stays within its part may take this copy, because the
        copy's tenant has its own part without it.
        """
        owner = copy.tenant
        return (bool(owner) and owner != tenant
                and self._holds(owner) - copy.size >= self._part.get(owner, 0)
                and self._turns.priority(tenant) >= self._turns.priority(owner))

    def held_until(self, copy: PlacedCopy) -> int:
        """Returns until when an idle copy counts for its tenant, in epoch ns."""
        return copy.left_at + horizon_ns(self._ledger.services[copy.service].restore_ns)

    def used(self, copy: PlacedCopy) -> None:
        """Counts an idle copy that takes a call or that is parked in this cycle."""
        if self._is_held(copy):
            self._idle[copy.tenant] -= copy.size

    def _is_held(self, copy: PlacedCopy) -> bool:
        return copy.tenant in self._clients and self._now < self.held_until(copy)

    def _holds(self, tenant: str) -> int:
        return self._turns.held(tenant) + self._idle.get(tenant, 0)
