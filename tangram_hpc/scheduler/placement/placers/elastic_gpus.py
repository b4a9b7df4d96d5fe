"""Places GPU services under `elastic`: which calls wait for a busy copy, where others start. Pure.

A *kind* is all calls of one service with the same degrees. A call takes a whole free aligned block.
Kinds are looked at in order of their oldest call; within a kind the order is that of `Waiting`.

Actions with `gpus=` take free GPUs before calls do, but they and the calls take turns (decision
0147). A free GPU that a copy had last goes to an action that nothing may overtake, once the copy's
minimum residency is over. One that an action had last goes to a starved kind: `serve_starved` runs
before actions are placed, and holds GPUs back from them. Where an action that nothing may overtake
lacks GPUs of a node, copies there whose minimum residency is over take no further calls.

Nothing is kept from cycle to cycle. A cycle applies these rules in order:

0. *Starved kinds.* A kind that no resident copy can serve, and whose oldest call has waited longer
   than `minimum_residency.starvation_limit_ns`, takes the free block where least is lost, also from
   waiting calls if the minimum residency of their copy is over. If there is none, the block that
   should come free first is booked for it: nothing else is brought there, and once the minimum
   residency of all copies on the block is over these take no further calls.
   Where several tenants use the GPUs, the call takes no copy that is kept for another tenant
   (`gpu_parts`) until it has waited for KEPT_LIMITS times that limit.
1. *Claims.* Where several tenants use the GPUs, a kind whose tenant holds less than its part may
   bring in a copy as by rule 3, in place of copies to which the tenant has a claim. If no block is
   free, one is booked, and its copies take no further calls.
2. *Own copies first.* An idle copy takes the next call of its kind, the widest copy first. Before
   that, `_split` replaces an idle copy that is wider than the load allows by narrower ones, and
   `_widen` replaces one that is narrower by a wider one, if only one call waits.
3. *Another copy.* Each kind without a copy brings in one; then kinds bring in copies in turn.
   `_more` assigns the waiting calls to the copies as these come free, prefetched calls counted. The
   oldest call brings in a copy, on the block where price + run + loss is least, if one of the
   waiting calls would end later without it. That call's expected wait must also be longer than the
   price, and longer than 1 to 3 times the loss (3 if a restore is much longer than a call). price =
   restore * (1 - use^2) and loss = the sum over services of restore * chance * use^2 for each idle
   copy that is parked. `use` is the part of the time in which the other copies of the service are
   busy with all its calls, so use^2 is about the chance that a call finds none of them idle; it is
   1 if there are none. `chance` is the chance that a call comes at all: x / (1 + x) of x expected
   calls. This rule parks no copy that has waiting calls, and none that is kept for another tenant.
   A copy to which the call's tenant has a claim may be parked, and costs nothing.

*Widths.* A copy is at most as wide as the load allows (`_wide`): all services fit beside each other
at that width, or they take turns and each call gains more by the width than it waits for restores.
A service's even part of the GPUs may be used at once; beyond it a wide copy must be worth a restore
(`_cheapest`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NamedTuple

from ....domain.ids import client_of
from ....domain.service import service_of
from ...state.demand import ONE, Calls
from ...state.queue import GPU, ActionShape, ShapeQueue
from ...state.speed import run_ns
from ...state.tenant_use import NO_LIMIT, Rank
from ..minimum_residency import gpu_demand, residency_end_ns, starvation_limit_ns
from ..snapshot import NodeView, Snapshot
from .base import Placement
from .copy_map import CopyMap, PlacedCopy
from .gpu_parts import GpuParts
from .waiting import OVERDUE_NS, Next, Waiting

BYPASS = 64  # how often a call may be overtaken by shorter ones of its kind
LOOK = 64  # how many calls of one kind are looked at in one cycle
WIDE = 8  # a wide copy pays if 8 times the expected calls save the time of a restore
LOSSES = 3  # a call waits for busy copies for at most 3 times the cost of parking
RHO = (4, 5)  # the load that a copy should carry, as a fraction
LONG = 3  # if a restore is longer than 3 runs, no copy is wide until the load is known
KEPT_LIMITS = 2  # kept copies of other tenants are taken after so many starvation limits
OVER = (3, 4)  # a wide copy may be split if its width loads more than this part of all GPUs

Spot = tuple[int, int, int, tuple[int, ...], NodeView]  # loss, last used, node, GPUs, node


class _Load(NamedTuple):
    """The GPUs that all kinds need at one width of their copies, in 1/ONE.

    Attributes:
        resident: if all services are resident beside each other.
        restoring: if they take turns and each call waits for a restore. Services that nobody calls
            need nothing then.
    """

    resident: int
    restoring: int

    def missing(self, total: int) -> int:
        """Returns the part of the needed GPUs that is missing if there are `total`, in 1/ONE. It is
        about the chance that a call finds no copy of its service.
        """
        return max(0, ONE - total * ONE // max(1, self.resident))


def chance(calls: int) -> int:
    """Returns the chance that any call comes if `calls` are expected; both in 1/ONE."""
    return (calls << 20) // (calls + ONE)


class ServiceCycle:
    """The decisions of one cycle. Computed losses are kept until a copy is opened.

    Args:
        view: the snapshot of this cycle.
        placement: gets the grants.
        kept: numbers of the nodes on which an action that nothing may overtake lacks GPUs.
    """

    def __init__(self, view: Snapshot, placement: Placement, kept: Collection[int]) -> None:
        self._view, self._now, self._placement = view, view.now_ns, placement
        self._copies = CopyMap(view, placement)
        self._demand, self._kept = view.ledger.demand, kept
        queues: dict[ActionShape, list[ShapeQueue]] = {}
        for shard in view.ledger.ready.shards(GPU):
            for shape, queue in shard.queues.items():
                queues.setdefault(shape._replace(name="", size=0, resizable=True), []).append(queue)
        self._turns = view.turns(GPU)
        self._queues = {want: Waiting(view.ledger, some, self._now, BYPASS, turns=self._turns)
                        for want, some in queues.items()}
        # by service: the kinds whose calls wait
        self._kinds: dict[str, list[tuple[ActionShape, Waiting]]] = {}
        for want, q in self._queues.items():
            self._kinds.setdefault(service_of(want.key), []).append((want, q))
        self._gpu_demand = gpu_demand(self._queues)
        self._booked: tuple[int, frozenset[int]] | None = None  # node and GPUs of a booked block
        self._drains = False  # the copies on the booked block take no further calls
        # copies -> cost of parking them together.
        self._losses: dict[tuple[PlacedCopy, ...], int] = {}
        self._loads: dict[int, _Load] = {}
        self._parts: GpuParts | None = None  # None unless several tenants use the GPUs
        if self._turns is not None:
            parts = GpuParts(view.ledger, self._copies, self._turns, self._now)
            self._parts = parts if parts.several else None
        self._again_at = 0  # when to look again although nothing may have happened, in epoch ns
        # free GPUs that the actions of this cycle do not get
        self._held_back: list[tuple[NodeView, tuple[int, ...]]] = []

    def serve_starved(self) -> None:
        """Starts starved calls, and holds back from the actions with `gpus=` that are placed next
        the free GPUs that are booked for such a call, or whose copy has waiting calls and has not
        been there for its minimum residency. `give_back` follows.
        """
        self._rescue_starved(self._oldest())
        if self._booked is not None:
            number, gpus = self._booked
            node = self._view.nodes[number]
            block = tuple(sorted(gpus))
            # Where an action lacks GPUs, it takes those that have a copy. It may need the others
            # of the block beside them, and the call would not get all of these either.
            if number not in self._kept or not self._copies.on(node, block):
                self._hold_back(node, tuple(gpu for gpu in block if node.gpus.is_free(gpu)))
        for copies in self._copies.of.values():
            for copy in copies:
                if self._copies.is_idle(copy) and self._must_stay(copy):
                    self._hold_back(copy.node, copy.gpus)

    def _hold_back(self, node: NodeView, gpus: tuple[int, ...]) -> None:
        if gpus:
            node.gpus.take(gpus)
            self._held_back.append((node, gpus))

    def give_back(self, kept: Collection[int]) -> set[int]:
        """Takes note of the actions that have been placed, and returns the nodes where GPUs were
        held back from them. `go` follows.

        Args:
            kept: the nodes on which an action that nothing may overtake lacks GPUs now.
        """
        for node, gpus in self._held_back:
            node.gpus.give(gpus)
        for copy in self._copies.forget_evicted():
            self._note_used(copy)
        self._losses = {}
        self._booked, self._drains, self._kept = None, False, kept
        return {node.node for node, _ in self._held_back}

    def go(self) -> int:
        """Starts service calls; returns when to look again, in epoch ns, or 0 for no need.

        O(queues + kinds x (kinds + blocks) + calls looked at x log copies).
        """
        oldest = self._oldest()
        self._rescue_starved(oldest)
        for first, want in oldest if self._parts is not None else ():
            self._claim(want, self._priority(oldest[0][0]) > self._priority(first))
        for _, want in oldest:
            self._use_idle(want)
        self._bring_in([want for _, want in oldest])
        if self._booked is not None and self._drains:
            number, gpus = self._booked
            self._placement.drained.update((number, gpu) for gpu in gpus)
        self._placement.drained.update(at for at, copy in self._copies.at.items()
                                       if at[0] in self._kept and self._is_drained(copy))
        for want, q in self._queues.items():
            if (left := q.oldest()) is not None:
                self._look_again(self._came(left) + self._starvation_limit(want))
        return self._again_at

    def _oldest(self) -> list[tuple[Next, ActionShape]]:
        """Returns the oldest call of each kind, in the order in which kinds are looked at."""
        oldest = [(o, want) for want, q in self._queues.items() if (o := q.oldest()) is not None]
        oldest.sort(key=lambda x: (self._rank(x[0]), self._came(x[0]), x[0].order_tag))
        return oldest

    def _rescue_starved(self, oldest: list[tuple[Next, ActionShape]]) -> None:
        for first, want in oldest:
            if self._now - self._came(first) >= self._starvation_limit(want):
                self._rescue(want)

    def _bring_in(self, wants: list[ActionShape]) -> None:
        """Brings in a copy for each kind without one, then copies for the kinds in turn."""
        for want in wants:
            if self._queues[want].n and not self._copies.usable(want):
                self._more(want)
        left = [want for want in wants if self._queues[want].n]
        while left:
            left = [want for want in left if self._more(want) and self._queues[want].n]

    def _use_idle(self, want: ActionShape) -> None:
        q = self._queues[want]
        while q.n:
            if q.n > 1:
                self._split(want)
            copy = self._idle(want)
            if copy is None or not q.n:
                return
            if copy.size > self._room(q.head()):
                # a narrower one that is idle, or one that is brought in, or no call of its tenant
                copy = self._idle(want, self._room(q.head()))
                if copy is None:
                    if not self._more(want):
                        self._leave_out(want, q.head())
                    continue
            if q.n == 1 and self._widen(want, copy):
                continue
            head = self._take(want)
            self._note_used(copy)
            self._copies.begin(copy, head.action, head.shape)

    # ---- queries -------------------------------------------------------------------------------

    def _rank(self, first: Next) -> Rank | None:
        """Returns the rank of a call's tenant; None for all if there is nothing to compare."""
        turns = self._turns
        return None if turns is None else turns.rank(self._tenant(first))

    def _priority(self, call: Next) -> int:
        return 0 if self._turns is None else self._turns.priority(self._tenant(call))

    def _room(self, call: Next | None) -> int:
        """Returns how many GPUs the limits of a call's tenant allow it."""
        return NO_LIMIT if call is None else self._view.room(call.action, call.shape)

    def _tenant(self, call: Next) -> str:
        return "" if self._turns is None else self._turns.tenant_of(client_of(call.action))

    def _leave_out(self, want: ActionShape, call: Next | None) -> None:
        """Leaves the calls of this kind that the call's tenant has out of the cycle."""
        if call is not None and self._turns is not None:
            self._queues[want].leave_out(self._tenant(call))

    def _may(self, want: ActionShape, call: Next | None) -> bool:
        """Returns whether there is a call and the limits of its tenant allow it the smallest
        degree. If they do not, the tenant's calls of this kind are left out of the cycle.
        """
        if call is None or self._room(call) >= want.degrees[0]:
            return call is not None
        self._leave_out(want, call)
        return False

    def _usable(self, want: ActionShape, call: Next) -> list[PlacedCopy]:
        """Returns the copies, busy or not, on which this call may run."""
        room = self._room(call)
        return [copy for copy in self._copies.usable(want) if copy.size <= room]

    def _came(self, first: Next) -> int:
        return self._view.ledger.actions[first.action].submitted_at

    def _starvation_limit(self, want: ActionShape) -> int:
        return starvation_limit_ns(self._view.ledger, want, self._gpu_demand, self._copies.total)

    def _take(self, want: ActionShape) -> Next:
        head = self._queues[want].head()
        assert head is not None
        self._queues[want].take(head)
        return head

    def _waits(self, service: str, degrees: tuple[int, ...]) -> int:
        """Returns how many calls of a kind wait."""
        return sum(q.n for want, q in self._kinds.get(service, ()) if want.degrees == degrees)

    def _calls(self, want: ActionShape) -> Calls:
        return self._demand.kinds[service_of(want.key), want.degrees]

    def _restore(self, service: str) -> int:
        return self._view.ledger.services[service].restore_ns

    def _open(self, want: ActionShape, spot: Spot, head: Next) -> None:
        self._queues[want].take(head)
        for copy in self._copies.on(spot[4], spot[3]):
            self._note_used(copy)
        self._copies.open(spot[4], spot[3], head.action, head.shape)
        self._losses = {}

    def _note_used(self, copy: PlacedCopy) -> None:
        if self._parts is not None:
            self._parts.used(copy)

    def _is_booked(self, node: NodeView, gpus: tuple[int, ...]) -> bool:
        return node.node in self._kept or self._is_booked_block(node, gpus)

    def _is_booked_block(self, node: NodeView, gpus: tuple[int, ...]) -> bool:
        booked = self._booked
        return booked is not None and booked[0] == node.node and not booked[1].isdisjoint(gpus)

    def _is_drained(self, copy: PlacedCopy) -> bool:
        if copy.node.node in self._kept:
            return not self._must_stay(copy)
        return self._drains and self._is_booked(copy.node, copy.gpus)

    def _idle(self, want: ActionShape, most: int = NO_LIMIT) -> PlacedCopy | None:
        """Returns the widest idle copy of at most `most` GPUs for calls of this shape."""
        idle = [c for c in self._copies.usable(want)
                if c.size <= most and self._copies.is_idle(c) and not self._is_drained(c)]
        return min(idle, key=lambda c: (-c.size, c.node.node, c.gpus), default=None)

    def _loss(self, over: list[PlacedCopy]) -> int:
        """Returns the expected cost of parking these idle copies together, in ns."""
        if len(over) == 1:
            return self._loss_of(over)
        by_service: dict[str, list[PlacedCopy]] = {}
        for copy in over:
            by_service.setdefault(copy.service, []).append(copy)
        return sum(self._loss_of(parked) for parked in by_service.values())

    def _loss_of(self, parked: list[PlacedCopy]) -> int:
        """Returns the expected cost of parking these idle copies of one service, in ns."""
        key = tuple(parked)
        if key not in self._losses:
            service = parked[0].service
            copies = self._copies.of[service]
            idle = sum(self._copies.is_idle(c) for c in copies)
            calls = sum(self._demand.kinds[kind].expected(self._now)
                        for kind in self._demand.of_service.get(service, ())
                        if any(c.size in kind[1] for c in parked))
            loss = self._restore(service) * chance(calls // max(1, idle)) >> 20
            use = self._use(service, [c for c in copies if c not in parked])
            self._losses[key] = len(parked) * ((loss * use >> 20) * use >> 20)
        return self._losses[key]

    def _use(self, service: str, copies: list[PlacedCopy]) -> int:
        """Returns the part of the next horizon in which these copies are busy, in 1/ONE.

        All calls of the service that wait and that are expected count. The result is at most ONE;
        without copies it is ONE.
        """
        use = 0 if copies else ONE
        for service_, degrees in self._demand.of_service.get(service, ()) if copies else ():
            calls = self._demand.kinds[service_, degrees]
            served = sum(calls.horizon * ONE // max(1, run_ns(calls.work_ns, calls.serial, c.size))
                         for c in copies if c.size in degrees)
            if served:
                n = calls.steady(self._now) + ONE * self._waits(service, degrees)
                use += n * ONE // served
        return min(ONE, use)

    def _load(self, size: int) -> _Load:
        """Returns what all kinds need if each call runs on at most `size` GPUs.

        Each kind counts with its load, or with the chance that a call comes at all if that is more.
        A service that was never called counts once with its smallest degree. A call of a service
        with batches counts with its share in the batch that the load fills. A young rate of such a
        service is not scaled up: a copy that is too wide can carry more calls in each batch, and
        one that is too narrow is hard to get rid of.
        """
        if size not in self._loads:
            resident, restoring, services = 0, 0, self._view.ledger.services
            if len(services) > len(self._demand.of_service):
                resident = ONE * sum(spec.degrees[0] for name, spec in services.items()
                                     if name not in self._demand.of_service)
            for (service, degrees), calls in self._demand.kinds.items():
                d = max(x for x in degrees if x <= max(size, degrees[0]))
                spec = services[service]
                young = spec.batch > 1 and calls.is_young(self._now)
                expected = calls.expected(self._now) if young else calls.steady(self._now)
                # calls in a window, more by what a copy should have free
                due = calls.in_window(self._now, scaled=not young) * RHO[1] // RHO[0]
                alone = run_ns(calls.work_ns, calls.serial, d)
                # The GPUs hold total / d copies. The calls that come for one copy while a call runs
                # on it are its next batch.
                batch = 1 + (due * alone // calls.window * d // self._copies.total >> 20)
                run = self._demand.share(service, min(spec.batch, batch), alone)
                resident += max(chance(expected), due * run // calls.window) * d
                restoring += due * (run + spec.restore_ns) // calls.window * d
            self._loads[size] = _Load(resident, restoring)
        return self._loads[size]

    def _wide(self, want: ActionShape, most: int) -> int:
        """Returns the largest degree of at most `most` GPUs on which the expected calls still fit.

        Where not all services fit beside each other, they fit in turns: a wider degree is taken
        if the GPUs carry the load with a restore for each call, and if a call gains more run time
        by the width than the restores cost that it adds.
        """
        best, total = want.degrees[0], self._copies.total * ONE
        calls, restore = self._calls(want), self._restore(service_of(want.key))
        for d in want.degrees[1:]:
            load = self._load(d)
            if d > most or load.resident > total < load.restoring:
                break
            gain = (run_ns(calls.work_ns, calls.serial, best)
                    - run_ns(calls.work_ns, calls.serial, d))
            missing = load.missing(total) - self._load(best).missing(total)
            if load.resident > total and gain <= restore * missing >> 20:
                break
            best = d
        return best

    def _spot(self, want: ActionShape, size: int, call: Next, force: bool = False,
              ignore: ActionShape | None = None) -> Spot | None:
        """Returns the free block whose parking costs least, or None.

        Of blocks that cost the same, it is the one used longest ago. Copies to which the call's
        tenant has a claim cost nothing.

        Args:
            want: the shape of the calls.
            size: GPUs of the block.
            call: the call that is to run there.
            force: for a starved call, which may take copies from waiting calls after their minimum
                residency.
            ignore: calls of this shape do not protect the copies that they wait for.
        """
        best: Spot | None = None
        for node, gpus, over in self._copies.blocks(want, size):
            if node.node in self._kept and (over or not force):
                continue
            if self._is_booked_block(node, gpus):
                continue
            claims = [] if force else self._claimed(want, call, over, size)
            if any(self._must_stay(c) or self._is_kept_from_starved(c, want, call) if force
                   else self._keeps(c, call, ignore, c in claims) for c in over):
                continue
            loss = self._loss([c for c in over if c not in claims])
            used = max((c.used_at for c in over), default=0)
            if best is None or (loss, used, node.node, gpus) < best[:4]:
                best = (loss, used, node.node, gpus, node)
        return best

    def _claimed(self, want: ActionShape, call: Next, over: list[PlacedCopy], size: int
                 ) -> list[PlacedCopy]:
        """Returns those of the copies to which a call's tenant has a claim, for so many GPUs."""
        parts, tenant = self._parts, self._tenant(call)
        if parts is None or not self._has_claims(want, tenant, size):
            return []
        return [c for c in over if parts.has_claim(c, tenant)]

    def _has_claims(self, want: ActionShape, tenant: str, size: int) -> bool:
        """Returns whether a tenant may claim copies for calls of this shape."""
        return (self._parts is not None and self._parts.is_behind(tenant, size)
                and all(c.tenant in ("", tenant) for c in self._copies.usable(want)))

    def _keeps(self, copy: PlacedCopy, call: Next, ignore: ActionShape | None, claimed: bool
               ) -> bool:
        if copy.stays_until > self._now and (ignore is None
                                             or copy.service != service_of(ignore.key)):
            self._look_again(copy.stays_until)
            return True
        return not claimed and (self._is_kept(copy, call) or self._wanted(copy, ignore))

    def _is_kept(self, copy: PlacedCopy, call: Next) -> bool:
        """Returns whether an idle copy is kept for its tenant. If it is, the cycle asks to be
        called again when that ends.
        """
        least = call.shape.degrees[0]
        if self._parts is None or not self._parts.keeps(copy, self._tenant(call), least):
            return False
        self._look_again(self._parts.held_until(copy))
        return True

    def _look_again(self, at: int) -> None:
        if at > self._now:
            self._again_at = min(self._again_at or at, at)

    def _is_kept_from_starved(self, copy: PlacedCopy, want: ActionShape, call: Next) -> bool:
        """Returns whether a copy is kept for its tenant although a call is starved."""
        until = self._came(call) + KEPT_LIMITS * self._starvation_limit(want)
        if until <= self._now or not self._is_kept(copy, call):
            return False
        self._look_again(until)
        return True

    def _must_stay(self, copy: PlacedCopy) -> bool:
        """Returns whether calls wait for a copy whose minimum residency is not over."""
        oldest = min((self._came(o) for want, q in self._kinds.get(copy.service, ())
                      if copy.size in want.degrees and (o := q.oldest()) is not None), default=0)
        end = residency_end_ns(copy.since, self._restore(copy.service), oldest) if oldest else 0
        if end <= self._now:
            return False
        if self._copies.is_idle(copy):  # a busy copy is looked at again when its call ends
            self._look_again(end)
        return True

    def _wanted(self, copy: PlacedCopy, ignore: ActionShape | None) -> bool:
        return any(q.n and want != ignore and copy.size in want.degrees
                   for want, q in self._kinds.get(copy.service, ()))

    # ---- the rules -----------------------------------------------------------------------------

    def _rescue(self, want: ActionShape) -> None:
        """Finds or books a block for a starved kind, unless the kind has a copy to serve it."""
        head, size = self._queues[want].oldest(), want.degrees[0]
        if head is None or not self._may(want, head) or self._usable(want, head):
            return
        spot = self._spot(want, size, head, force=True)
        if spot is not None:
            self._open(want, spot, head)
        elif self._booked is None and size > 1:
            blocks = [(self._last_residency(n, gpus), max(self._free_at(n, gpu) for gpu in gpus),
                       n.node, gpus)
                      for n in self._copies.nodes if self._copies.may(n, want)
                      for gpus, _ in n.gpus.blocks[size]
                      if self._copies.may_reside(want, n, gpus)
                      and not any(self._is_kept_from_starved(c, want, head)
                                  for c in self._copies.on(n, gpus))]
            if blocks:
                since, _, number, gpus = min(blocks)
                self._booked, self._drains = (number, frozenset(gpus)), not since

    def _claim(self, want: ActionShape, waits_for_others: bool) -> None:
        """Brings in a copy for a call whose tenant holds less than its part. If that would pay but
        no block is free, one is booked whose copies the tenant may claim.

        Args:
            want: the shape of the calls.
            waits_for_others: whether calls of a higher priority wait; then nothing is done.
        """
        head, size = self._queues[want].oldest(), want.degrees[0]
        if waits_for_others or head is None or not self._has_claims(want, self._tenant(head), size):
            return
        self._use_idle(want)  # so that the oldest calls get the copies that are there
        head = self._queues[want].oldest()
        if head is None or not self._has_claims(want, tenant := self._tenant(head), size):
            return
        if self._more(want) or self._booked is not None:
            return
        fit, calls = self._usable(want, head), self._calls(want)
        price = self._price(want, fit)
        cost = price + run_ns(calls.work_ns, calls.serial, size)
        if fit and not self._too_long(want, fit, price, cost, 0):
            return
        blocks = [(max(self._free_at(n, gpu) for gpu in gpus), n.node, gpus)
                  for n in self._copies.nodes
                  if n.node not in self._kept and self._copies.may(n, want)
                  for gpus, _ in n.gpus.blocks[size]
                  if self._copies.may_reside(want, n, gpus)
                  and all(self._may_come_free(n, gpu, tenant) for gpu in gpus)]
        if blocks:
            _, number, gpus = min(blocks)
            self._booked, self._drains = (number, frozenset(gpus)), True

    def _may_come_free(self, node: NodeView, gpu: int, tenant: str) -> bool:
        """Returns whether a GPU is free, or has a copy to which the tenant has a claim."""
        copy = self._copies.at.get((node.node, gpu))
        if copy is None:
            return node.gpus.is_free(gpu)
        return (self._parts is not None and self._parts.has_claim(copy, tenant)
                and copy.stays_until <= self._now)

    def _last_residency(self, node: NodeView, gpus: tuple[int, ...]) -> int:
        """Returns when the newest copy that must stay was brought to this block; 0 for none."""
        found = (self._copies.at.get((node.node, gpu)) for gpu in gpus)
        return max((c.since for c in found if c is not None and self._must_stay(c)), default=0)

    def _free_at(self, node: NodeView, gpu: int) -> int:
        copy = self._copies.at.get((node.node, gpu))
        if copy is None and not node.gpus.is_free(gpu):
            return self._now + OVERDUE_NS
        return self._copies.free_at(copy, self._now)

    def _split(self, want: ActionShape) -> None:
        """Replaces an idle copy that is too wide for the expected load by narrower copies.

        It does so if the services do not all fit on the GPUs at this width, even where they take
        turns, or if the waiting calls, and the calls expected within two horizons, then end sooner.
        With `coming` calls for each copy, the sum of all their ends is about coming^2/2 runs on one
        wide copy. On k narrow copies it is a restore for each call and coming^2/2k narrow runs. The
        new width is the one on which the last call ends first, after `coming / k` runs and its own.
        """
        q, restore = self._queues[want], self._restore(service_of(want.key))
        fit, calls = self._copies.usable(want), self._calls(want)
        for copy in fit:
            if (copy.size == want.degrees[0] or not self._copies.is_idle(copy)
                    or self._is_booked(copy.node, copy.gpus)):
                continue
            runs = {d: run_ns(calls.work_ns, calls.serial, d) for d in want.degrees}
            stay, each = runs[copy.size], q.n // len(fit)
            coming = each + (2 * calls.expected(self._now) // len(fit) >> 20)
            load, total = self._load(copy.size).resident * RHO[0] // RHO[1], self._copies.total
            if each * stay <= restore or load * OVER[1] <= total * ONE * OVER[0]:
                continue
            top = min((d for d in want.degrees if d < copy.size),
                      key=lambda d: (runs[d] * (copy.size + coming * d), d))
            split = 2 * restore + coming * runs[top] * top // copy.size
            if load > total * ONE or coming * stay > split:
                for k in range(0, copy.size, top):
                    head = q.head()
                    if head is not None and self._room(head) >= top:
                        gpus = copy.gpus[k:k + top]
                        self._open(want, (0, 0, 0, gpus, copy.node), head)
                return

    def _widen(self, want: ActionShape, copy: PlacedCopy) -> bool:
        """Brings in a wider copy for the only call that waits, and returns True, if that pays.

        `copy` is idle but narrower than the load allows. A wider copy pays if this call, and the
        calls within two horizons that find no wide copy idle, gain more time than twice the restore
        and the loss of the parked copies.
        """
        room = self._room(self._queues[want].head())
        top = self._wide(want, room)
        if top <= copy.size:
            return False
        calls, restore = self._calls(want), self._restore(service_of(want.key))
        gain = (run_ns(calls.work_ns, calls.serial, copy.size)
                - run_ns(calls.work_ns, calls.serial, top))
        gain = gain * (ONE + 2 * calls.expected(self._now)) >> 20
        use = self._use(service_of(want.key), [c for c in self._copies.usable(want)
                                               if c.size >= top])
        gain = (gain * use >> 20) * use >> 20
        if gain <= 2 * restore:
            return False
        head = self._queues[want].head()
        assert head is not None
        # the kind's own idle copies may be parked
        spot = self._spot(want, top, head, ignore=want)
        if spot is None or gain <= 2 * restore + spot[0]:
            return False
        self._open(want, spot, head)
        return True

    def _more(self, want: ActionShape) -> bool:
        """Brings in a copy for the oldest call, and returns True, if a call waits too long."""
        head = self._queues[want].oldest()
        if head is None or self._spot(want, want.degrees[0], head) is None:
            return False
        if not self._may(want, head):
            return True  # the next call is another tenant's
        fit = self._usable(want, head)
        price = self._price(want, fit)
        cost, spot = self._cheapest(want, price, head)
        if fit and not self._too_long(want, fit, price, cost, spot[0]):
            return False
        self._open(want, spot, head)
        return True

    def _price(self, want: ActionShape, fit: list[PlacedCopy]) -> int:
        """Returns what a new copy beside these costs, in ns: a restore, less what others gain."""
        use, restore = self._use(service_of(want.key), fit), self._restore(service_of(want.key))
        return restore - ((restore * use >> 20) * use >> 20)

    def _cheapest(self, want: ActionShape, price: int, head: Next) -> tuple[int, Spot]:
        """Returns the cost in ns and the block of the cheapest new copy, over all degrees that the
        load and the limits of the call's tenant allow.

        A copy within the service's even part of the GPUs takes nothing from other services, so it
        may be as wide as that. It takes half of all GPUs at most, because the load is not known
        when the first call of the only service comes. A wider one must save the time of a restore.
        """
        top, service = self._wide(want, self._room(head)), service_of(want.key)
        best: tuple[int, Spot] | None = None
        calls, restore = self._calls(want), self._restore(service)
        narrow = run_ns(calls.work_ns, calls.serial, want.degrees[0])
        often = WIDE * (ONE + calls.expected(self._now))
        services = self._view.ledger.services
        if (restore > LONG * narrow and calls.is_young(self._now)
                and services[service].batch == 1):
            # The rate is not known yet: only waiting calls count. With batches a wide copy is no
            # waste, see `_load`.
            often = ONE * self._queues[want].n
        held = sum(c.size for c in self._copies.of.get(service, ()))
        even = self._copies.total // max(2, len(services)) - held
        for d in want.degrees:
            run = run_ns(calls.work_ns, calls.serial, d)
            if best is not None and d > even and (narrow - run) * often >> 20 <= restore:
                break
            spot = self._spot(want, d, head) if d <= top else None
            if spot is not None:
                cost = price + run + spot[0]
                if best is None or cost < best[0]:
                    best = (cost, spot)
        assert best is not None
        return best

    def _too_long(self, want: ActionShape, fit: list[PlacedCopy], price: int, cost: int,
                  loss: int) -> bool:
        """Returns whether a waiting call would end sooner on a new copy.

        The waiting calls are assigned to the copies as these come free. Each call is assumed to run
        for the mean time, since the oldest may be the longest. `cost` is that of the new copy,
        and `loss` the part of it that other services lose; all in ns.
        """
        calls = self._calls(want)
        free = [(self._copies.free_at(c, self._now), i,
                 run_ns(calls.work_ns, calls.serial, c.size)) for i, c in enumerate(fit)]
        heapq.heapify(free)
        short = 2 * run_ns(calls.work_ns, calls.serial, want.degrees[0])
        times = self._restore(service_of(want.key)) * ONE // max(1, short)
        least = max(price, min(max(times, ONE), LOSSES * ONE) * loss >> 20)
        for _ in range(min(self._queues[want].n, LOOK)):
            at, i, run = free[0]
            wait = max(0, at - self._now)
            if wait > least and cost < wait + run:
                return True
            heapq.heapreplace(free, (self._now + wait + run, i, run))
        return False
