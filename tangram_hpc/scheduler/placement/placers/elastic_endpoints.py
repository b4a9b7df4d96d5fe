"""Starts endpoint calls under `elastic`: in order of readiness, beside the calls that tenants keep.
Pure.

Nobody can take a call back, so where several tenants share an endpoint its concurrent calls are
kept for those that used them lately (`kept_units`).
"""

from __future__ import annotations

from ....domain.ids import client_of
from ...state.speed import run_ns
from ...state.tenant_use import TenantTurns
from ..snapshot import EndpointView, Snapshot
from .base import Placement, start_calls
from .kept_units import KeptUnits
from .tenant_parts import BALANCE_NS, RecentUse


class ElasticEndpoints:
    """Starts the calls of all endpoints, and remembers what tenants held of them lately."""

    def __init__(self) -> None:
        self._recent: dict[str, RecentUse] = {}  # by endpoint

    def place(self, view: Snapshot, placement: Placement) -> None:
        """Adds the calls that start now. O(starts + endpoints x tenants)."""
        for name, endpoint in view.endpoints.items():
            pool = "endpoint:" + name
            if endpoint.starts <= 0 or not view.ledger.ready.waits(pool):
                continue
            turns = view.turns(pool)
            if turns is None:
                start_calls(view, placement, endpoint)
            else:
                self._start_beside_kept(view, placement, endpoint, turns)

    def _start_beside_kept(self, view: Snapshot, placement: Placement, endpoint: EndpointView,
                           turns: TenantTurns) -> None:
        ledger = view.ledger
        kept = KeptUnits(ledger.endpoints[endpoint.name].concurrency, endpoint.free, turns,
                         self._recent.setdefault(endpoint.name, RecentUse()), view.now_ns)

        def may_start(call: int) -> bool:
            entry, tenant = ledger.actions[call], turns.tenant_of(client_of(call))
            serial, work = ledger.estimator.estimate(entry.action)
            starts = kept.may_take(tenant, 1, run_ns(work, serial, 1),
                                   view.now_ns - entry.submitted_at)
            if starts:
                kept.take(tenant, 1)
            return starts

        start_calls(view, placement, endpoint, may_start)
        if kept.held_back:
            placement.look_again(view.now_ns + BALANCE_NS)
