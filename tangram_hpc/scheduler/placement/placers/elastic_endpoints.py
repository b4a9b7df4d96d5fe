"""Starts endpoint calls under `elastic`: in order of readiness, beside the calls that tenants keep.
Pure.

Nobody can take a call back. So where several tenants share an endpoint, its concurrent calls are
kept for the tenants that used them lately (`kept_units`).
"""

from __future__ import annotations

from typing import NamedTuple

from ....domain.ids import client_of
from ...state.speed import run_ns
from ...state.tenant_use import TenantTurns
from ..snapshot import EndpointView, Snapshot
from .base import Placement, start_calls
from .kept_units import KeptUnits
from .recent_use import RecentUse
from .tenant_parts import BALANCE_NS


class _Seen(NamedTuple):
    """The state of an endpoint when some of its calls were held back. While it stays the same, only
    the passage of time can let these calls start.

    Attributes:
        waiting: how many calls wait.
        busy: how many run.
        ended: how many have ended.
        starts: how many the quota lets start now.
        concurrency: how many may run at once.
    """

    waiting: int
    busy: int
    ended: int
    starts: int
    concurrency: int


class ElasticEndpoints:
    """Starts the calls of all endpoints, and remembers what tenants held of them lately."""

    def __init__(self) -> None:
        self._recent: dict[str, RecentUse] = {}  # by endpoint
        # by endpoint where calls were held back: what was seen then, and when to look again
        self._held_back: dict[str, tuple[_Seen, int]] = {}

    def place(self, view: Snapshot, placement: Placement) -> None:
        """Adds the calls that start now. O(starts + endpoints), and where several tenants share an
        endpoint O((starts + shapes that are held back) x tenants) for it.
        """
        for name, endpoint in view.endpoints.items():
            pool = "endpoint:" + name
            if endpoint.starts <= 0:
                continue
            turns = view.turns(pool)
            if turns is None:
                start_calls(view, placement, endpoint)
                continue
            entry = view.ledger.endpoints[name]
            seen = _Seen(view.ledger.ready.waiting(pool), entry.busy, entry.calls, endpoint.starts,
                         entry.concurrency)
            before, again_at = self._held_back.pop(name, (None, 0))
            if seen != before or view.now_ns >= again_at:
                again_at = self._start_beside_kept(view, placement, endpoint, turns)
            if again_at:
                self._held_back[name] = seen, again_at
                placement.look_again(again_at)

    def _start_beside_kept(self, view: Snapshot, placement: Placement, endpoint: EndpointView,
                           turns: TenantTurns) -> int:
        """Starts calls beside those that are kept; returns when to look again if any was held back,
        in epoch ns, or 0.
        """
        ledger = view.ledger
        kept = KeptUnits(ledger.endpoints[endpoint.name].concurrency, endpoint.free, turns,
                         self._recent.setdefault(endpoint.name, RecentUse()), view.now_ns)

        def admit(call: int) -> bool:
            entry, tenant = ledger.actions[call], turns.tenant_of(client_of(call))
            serial, work = ledger.estimator.estimate(entry.action)
            starts = kept.may_take(tenant, 1, run_ns(work, serial, 1),
                                   view.now_ns - entry.submitted_at)
            if starts:
                kept.take(tenant, 1)
            return starts

        start_calls(view, placement, endpoint, admit)
        return view.now_ns + BALANCE_NS if kept.held_back else 0
