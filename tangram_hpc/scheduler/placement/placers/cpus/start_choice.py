"""Chooses the waiting actions that start on a node if units suffice. Pure.

The order is that of `Waiting`. An action that may not be overtaken and that lacks memory or GPUs
holds back only actions that want the same resource of the node. One that needs more CPUs than there
are lets others pass for a while; then CPUs gather for it, and others may have these only for as
long as `backfill.py` says.
"""

from __future__ import annotations

from typing import NamedTuple

from .....domain.action import Action
from .....domain.ids import client_of
from ....state.queue import ActionShape
from ....state.speed import run_ns
from ....state.tenant_use import NO_LIMIT
from ...snapshot import NodeView, Snapshot
from ..base import Placement, grant
from ..tenant_parts import TenantParts
from ..waiting import Next, Waiting
from .backfill import lent_until
from .node_leases import cpu_leases, expected_end, from_one, gives_back, is_elastic

# An action that needs more units than are free or can be taken lets others pass, until it has
# waited for PASSED_RUNS times its expected run. Then units gather for it.
PASSED_RUNS = 8


class Chosen(NamedTuple):
    """An action that starts if units suffice.

    Attributes:
        action: the action.
        shape: its shape.
        must: whether it starts whenever enough units can be taken from others. Those must that have
            waited long, or whose client was not served in this cycle yet.
        most: the most units that it may have; see `TenantParts.most`.
    """

    action: Action
    shape: ActionShape
    must: bool
    most: int


class Choice:
    """What is chosen on one node in one cycle. Actions with reserved CPUs are started at once.

    An action that needs more units than there are is chosen as well while others may pass it,
    because `divide_cpus` keeps units for it if its tenant stays behind another one.
    O(n log queues) for n actions that are chosen or passed over.

    Args:
        view: the state of this cycle.
        placement: gets the starts of actions with reserved CPUs.
        node: the node.
        waiting: the actions that wait for it, in order; they are drawn down.
        room: how many units are free or can be taken from running actions.
        started: actions that were started elsewhere in this cycle.
        parts: what the node's tenants may count on; None if there is nothing to compare.
        lent: until when units are lent that gather on the node, by the action for which they do;
            it is changed here.
        done: see `done_before`, by lease.

    Attributes:
        chosen: the actions that start if units suffice, in order.
        aside: actions for which units gather, and which cannot start in this cycle.
        keeps_gpus: whether a waiting action reserves the node's GPUs.
    """

    def __init__(self, view: Snapshot, placement: Placement, node: NodeView, waiting: Waiting,
                 room: int, started: set[int], parts: TenantParts | None, lent: dict[int, int],
                 done: dict[int, tuple[int, int, int]]) -> None:
        self._view, self._placement, self._node, self._waiting = view, placement, node, waiting
        self._room, self._parts, self._lent, self._done = room, parts, lent, done
        self._mem, self._gpus, self._mem_kept = node.free_mem_mib, node.free_gpus, False
        self._units: list[tuple[Action, int]] = []  # what was chosen, and the units it starts on
        self._lent_until = 0  # until when the units of `aside` are lent
        self.chosen: list[Chosen] = []
        self.aside: list[int] = []
        self.keeps_gpus = False
        while (head := waiting.head()) is not None:
            if head.action in started:
                waiting.take(head)
            elif waiting.allows(view, head):
                if self._room <= 0 and not head.shape.session:
                    break
                self._consider(head)

    def _consider(self, head: Next) -> None:
        """Chooses the action that comes next, or passes over it."""
        action = self._view.ledger.actions[head.action].action
        if self._lacks_memory_or_gpus(head):
            self._waiting.skip_shape(head.shape)
        elif head.shape.session:
            self._start_on_reserved(head)
        elif self._lent_until:
            self._lend(head, action)
        elif (least := self._least(head, action)) > self._room:
            self._choose_wide(head, action, least)
        else:
            self._choose(head, action, least, head.overdue)

    def _least(self, head: Next, action: Action) -> int:
        """Returns the fewest units on which an action can start."""
        elastic = is_elastic(action.resizable, action.degrees)
        return 1 if elastic else from_one(head.shape.degrees)[0]

    def _lacks_memory_or_gpus(self, head: Next) -> bool:
        """Returns whether memory or GPUs are lacking. If the action may not be overtaken, the free
        memory or GPUs are kept for it.
        """
        shape = head.shape
        mem = shape.mem_mib > self._mem or (self._mem_kept and shape.mem_mib > 0)
        gpus = shape.gpus > self._gpus or (self.keeps_gpus and shape.gpus > 0)
        self._mem_kept = self._mem_kept or (head.overdue and mem)
        self.keeps_gpus = self.keeps_gpus or (head.overdue and gpus)
        return mem or gpus

    def _take(self, head: Next, units: int) -> None:
        self._waiting.take(head)
        self._waiting.charge(head, units)
        self._mem, self._gpus = self._mem - head.shape.mem_mib, self._gpus - head.shape.gpus

    def _start_on_reserved(self, head: Next) -> None:
        shape, view = head.shape, self._view
        self._take(head, 0)
        own = len(view.ledger.sessions[shape.session].cores)
        grant(view, self._placement, head.action, shape, self._node,
              max((d for d in shape.degrees if d <= own), default=shape.degrees[0]))

    def _choose(self, head: Next, action: Action, least: int, overdue: bool) -> None:
        """Chooses an action for which there may be units, if none of them is kept for others."""
        most, parts, waiting = NO_LIMIT, self._parts, self._waiting
        if parts is not None and parts.keep and least <= self._room:
            most = self._beside_kept(head, action, least, overdue, parts)
            if most < least:
                return
        owed = waiting.several and waiting.is_first()
        self._take(head, from_one(head.shape.degrees)[0])
        self._room -= least
        self._units.append((action, least))
        self.chosen.append(Chosen(action, head.shape, overdue or owed, most))

    def _choose_wide(self, head: Next, action: Action, least: int) -> None:
        """Lets others pass an action that needs more units than there are, or gathers units."""
        view = self._view
        if not (head.overdue or self._was_passed_long(action, least)):
            self._waiting.skip_shape_of(head)
            self.chosen.append(Chosen(action, head.shape, False, NO_LIMIT))
            return
        until = self._until(action, least)
        if until <= view.now_ns:
            return self._choose(head, action, least, True)
        self.aside.append(action.id)
        self._take(head, from_one(head.shape.degrees)[0])
        self._lent_until = until
        # what running actions would give up is left to them until the wide action starts
        self._room = self._node.free_cpus - sum(units for _, units in self._units)

    def _until(self, action: Action, least: int) -> int:
        """Returns when the actions must end that are lent what gathers for an action; epoch ns."""
        view, lent, now = self._view, self._lent, self._view.now_ns
        before = lent.get(action.id, 0)
        if 0 < before <= now:
            return before
        ends = [(expected_end(view, lease, self._done.get(lease.lease)),
                 1 if gives_back(view, lease) else lease.units)
                for lease in cpu_leases(view, self._node) if lease.units]
        entries = view.ledger.actions
        ends += [(self._end(chosen, units), units) for chosen, units in self._units]
        until = lent_until(before, entries[action.id].submitted_at, least - self._room, ends, now)
        if until > now:
            for gone in [a for a in lent if a not in entries or entries[a].lease
                         or entries[a].ended_lease]:
                del lent[gone]
            lent[action.id] = until
        return until

    def _lend(self, head: Next, action: Action) -> None:
        """Chooses an action that should end before the units are needed that it takes."""
        least = self._least(head, action)
        if least > self._room or self._end(action, least) > self._lent_until:
            self._waiting.skip_shape_of(head)
        else:
            self._choose(head, action, least, False)

    def _end(self, action: Action, units: int) -> int:
        """Returns when an action should end that starts now on so many units, epoch ns."""
        serial, work = self._view.ledger.estimator.estimate(action)
        return self._view.now_ns + run_ns(work, serial, units)

    def _beside_kept(self, head: Next, action: Action, least: int, overdue: bool,
                     parts: TenantParts) -> int:
        """Returns the most units that an action may have beside those that are kept for other
        tenants; fewer than `least` if it was passed over for them.

        Where an action that needs several units has waited for long, units of its tenant's part
        gather for it: no other action of the tenant starts.
        """
        view, waiting, room = self._view, self._waiting, self._room
        tenant = view.ledger.tenants.tenant_of(client_of(action.id))
        run = self._end(action, least) - view.now_ns
        most = parts.most(tenant, least, run, room,
                          view.now_ns - view.ledger.actions[action.id].submitted_at)
        if most < least:
            if parts.held_back < self._node.cpus:
                waiting.take(head)  # one of its shape may be short
            else:
                waiting.skip_shape_of(head)
            if least > 1 and (overdue or self._was_passed_long(action, least)):
                waiting.leave_out(tenant)
        elif most < room and not is_elastic(action.resizable, action.degrees):
            parts.choose(tenant, least, max(d for d in action.degrees if d <= most))
        else:
            parts.choose(tenant, least, least)
            most = NO_LIMIT
        return most

    def _was_passed_long(self, action: Action, units: int) -> bool:
        """Returns whether an action that needs `units` units lets no other one pass any more."""
        now = self._view.now_ns
        waited = now - self._view.ledger.actions[action.id].submitted_at
        return waited >= PASSED_RUNS * (self._end(action, units) - now)
