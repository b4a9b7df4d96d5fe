"""Starts endpoint calls under `elastic`: in order of readiness, beside the calls that tenants keep.
Pure.

Nobody can take a call back, so where several tenants share an endpoint its concurrent calls are
kept for those that used them lately, as rigid actions leave them CPUs (`tenant_parts`).
"""

from __future__ import annotations

from ....domain.ids import client_of
from ...state.speed import run_ns
from ...state.tenant_use import TenantTurns
from ..snapshot import Snapshot
from .base import Placement, start_calls
from .tenant_parts import BALANCE_NS, Held, RecentUse, TenantParts


class ElasticEndpoints:
    """Starts the calls of all endpoints, and remembers what tenants held of them lately."""

    def __init__(self) -> None:
        self._recent: dict[str, RecentUse] = {}  # by endpoint: what each tenant held lately

    def place(self, view: Snapshot, placement: Placement) -> None:
        """Adds the calls that start now. O(starts + endpoints x tenants)."""
        for name, endpoint in view.endpoints.items():
            pool = "endpoint:" + name
            if endpoint.starts <= 0 or not view.ledger.ready.waits(pool):
                continue
            turns = view.turns(pool)
            if turns is None:
                start_calls(view, placement, endpoint)
                continue
            kept = _KeptCalls(view, name, turns, self._recent.setdefault(name, RecentUse()))
            start_calls(view, placement, endpoint, kept.may_start)
            if kept.held_back:
                again_at = view.now_ns + BALANCE_NS
                placement.again_at = min(placement.again_at or again_at, again_at)


class _KeptCalls:
    """The concurrent calls of one endpoint that are kept for its tenants, during one cycle."""

    def __init__(self, view: Snapshot, name: str, turns: TenantTurns, recent: RecentUse) -> None:
        self._view, self._endpoint, self._turns = view, view.endpoints[name], turns
        self._recent, present = recent, turns.present()
        held = {tenant: units for tenant in present if (units := turns.held(tenant))}
        recent.note(held, view.now_ns, turns.changed_at)
        self._parts = TenantParts(view.ledger.endpoints[name].concurrency, turns,
                                  {tenant: Held(units, units) for tenant, units in held.items()},
                                  present, recent)

    @property
    def held_back(self) -> int:
        """How many calls were told to leave the endpoint to other tenants."""
        return self._parts.held_back

    def may_start(self, call: int) -> bool:
        """Returns whether a call may start beside those that are kept; if so, it counts as started.
        """
        entry, ledger = self._view.ledger.actions[call], self._view.ledger
        tenant = self._turns.tenant_of(client_of(call))
        if self._parts.keep:
            serial, work = ledger.estimator.estimate(entry.action)
            waited_ns = self._view.now_ns - entry.submitted_at
            if self._parts.most(tenant, 1, run_ns(work, serial, 1), self._endpoint.free,
                                waited_ns) < 1:
                return False
        self._parts.choose(tenant, 1, 1)
        self._recent.add(tenant, 1, self._view.now_ns)
        return True
