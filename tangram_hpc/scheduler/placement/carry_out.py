"""Turns a placement into events that name the exact cores and GPUs. Pure.

A placer says how many units an action gets on which node; this module chooses which ones. Session
openings come first, then resizes that shrink, resizes that grow, and grants, so that the CPUs which
one lease gives up can be lent to another one in the same placement.

The module reads the ledger and changes nothing. A placement of units that are not free is an error
of the placer: it raises AssertionError and is never quietly reduced.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.service import BLOCK_SIZES, endpoint_of, service_of
from ..state.ledger import ActionEntry, LeaseEntry, Ledger, NodeEntry
from .placers.base import Grant, Placement, Resizing


class Carrier:
    """Makes the events of one placement.

    The free cores and GPUs of each node are kept as masks, which are drawn down as events are made.

    Attributes:
        left_out: whether a grant of the placement was left out, so that its units are still free.
    """

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger, self._now = ledger, now
        self._cores: dict[int, int] = {}
        self._gpus: dict[int, int] = {}
        self.left_out = False

    def events(self, placement: Placement) -> list[ev.Event]:
        """Returns the events of a placement in the order in which they must be applied."""
        ledger = self._ledger
        events: list[ev.Event] = []
        for opening in placement.openings:
            cores = self._choose(ledger.nodes[opening.node], opening.reserve)
            events.append(ev.SessionPlaced(self._now, opening.session, opening.node, cores))
        grow: list[Resizing] = []
        for resizing in placement.resizings:
            lease = ledger.leases[resizing.lease]
            self._may_resize(lease, resizing)
            if resizing.units < lease.units:
                events.append(self._shrunk(lease, resizing.units))
            elif resizing.units > lease.units:
                grow.append(resizing)
        for resizing in grow:
            lease = ledger.leases[resizing.lease]
            more = self._choose(ledger.nodes[lease.node], resizing.units - lease.units,
                                lease.cores)
            events.append(ev.LeaseResized(self._now, lease.lease, lease.cores + more))
        for number, granted in enumerate(self._apart(placement.grants), ledger.next_lease):
            events.append(self._granted(number, granted))
        return events

    def _apart(self, grants: list[Grant]) -> list[Grant]:
        """Returns the grants without those of background actions whose session starts another
        action too, because background processes run beside that action and need no CPUs of their
        own.
        """
        if len(grants) < 2:
            return grants
        actions = self._ledger.actions
        background = {g.action for g in grants
                      if actions[g.action].action.kind is Kind.BACKGROUND}
        if not background:
            return grants
        starts = {actions[g.action].action.session for g in grants if g.action not in background}
        kept = [g for g in grants if g.action not in background
                or actions[g.action].action.session not in starts]
        self.left_out = len(kept) < len(grants)
        return kept

    def _may_resize(self, lease: LeaseEntry, resizing: Resizing) -> None:
        action = self._ledger.actions[lease.action].action
        assert action.resizable and lease.key == "cpu" and not lease.reserved, f"fixed: {lease}"
        assert len(lease.lease_queue) == 1, f"leases wait behind it: {lease}"
        assert self._now >= lease.resizable_at, f"too soon after its last change: {lease}"
        assert 0 <= resizing.units <= action.degrees[-1], f"{resizing} of {action.degrees}"

    def _shrunk(self, lease: LeaseEntry, units: int) -> ev.Event:
        node = self._ledger.nodes[lease.node]
        mask = self._cores.setdefault(node.node, node.cores.free_mask)
        self._cores[node.node] = mask | node.cores.mask(lease.cores[units:])
        return ev.LeaseResized(self._now, lease.lease, lease.cores[:units])

    def _granted(self, number: int, granted: Grant) -> ev.Event:
        ledger, now = self._ledger, self._now
        entry, node = ledger.actions[granted.action], ledger.place(granted.node)
        action, gpus, restore_ns = entry.action, granted.gpus, 0
        cores: tuple[int, ...] = ()
        service = service_of(action.key)
        if service:
            size = granted.units
            assert size in action.degrees and size in BLOCK_SIZES and size == len(gpus), granted
            assert (gpus, node.gpus.mask(gpus)) in node.gpus.blocks[size], f"{gpus}: no block"
            if not node.gpus.holds(service, gpus):
                restore_ns = ledger.services[service].restore_ns
        elif not endpoint_of(action.key):
            cores = self._cores_for(entry, node, granted.units)
        if gpus:
            free = self._gpus.setdefault(node.node, node.gpus.free_mask)
            wanted = node.gpus.mask(gpus)
            assert free & wanted == wanted, f"{granted}: a GPU of {gpus} is not free"
            self._gpus[node.node] = free ^ wanted
        return ev.LeaseGranted(now, number, granted.action, granted.node, entry.attempt + 1, cores,
                               gpus, restore_ns)

    def _cores_for(self, entry: ActionEntry, node: NodeEntry, units: int) -> tuple[int, ...]:
        action = entry.action
        session = self._ledger.sessions.get(action.session)
        if session is not None and session.cores:
            return session.cores[:units]
        free_size = action.resizable and 0 <= units <= action.degrees[-1]
        assert units in action.degrees or free_size, f"{units} units of {action.degrees}"
        return self._choose(node, units, session.last_cores if session is not None else ())

    def _choose(self, node: NodeEntry, n: int, preferred: tuple[int, ...] = ()) -> tuple[int, ...]:
        if not n:
            return ()
        mask = self._cores.setdefault(node.node, node.cores.free_mask)
        cores, self._cores[node.node] = node.cores.choose(n, mask, preferred)
        return cores
