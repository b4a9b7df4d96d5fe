"""Pure. GPU services under `elastic`: which calls wait for a busy copy, and where others start.

A *kind* is all calls of one service with the same degrees. A call takes a whole free aligned block.
Kinds are looked at in order of their oldest call; within a kind the order is that of `Waiting`.
Nothing is kept from pass to pass. A pass applies these rules in order:

0. *Starved kinds.* A kind that no standing copy can serve, and whose oldest call has waited longer
   than `copy_terms.patience_ns`, takes the free block where least is lost, also from waiting calls
   if the term of their copy is over. If there is none, the block that should come free first is
   booked for it: nothing else is brought there, and once the terms of all copies on the block are
   over these take no further calls.
1. *Own copies first.* An idle copy takes the next call of its kind, the widest copy first. Before
   that `_split` remakes a copy that is wider than the load allows, and `_widen` one that is
   narrower for the last call that waits.
2. *Another copy.* Each kind without a copy brings in one; then kinds bring in copies by turns.
   `_more` deals the waiting calls to the copies as they will come free, calls given ahead counted.
   The oldest call brings in a copy where price + run + loss is least, if one of the calls would end
   later without it and would wait longer than price and than 1 to 3 times the loss (the more, the
   longer a restore is than a call). price = restore * (1 - chance that the copy is used again).
   loss = for each idle copy that is parked, its restore * the chance that a call comes for it and
   finds all other copies of its service busy. chance(x calls) = x / (1 + x). This rule parks no
   copy that has waiting calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from ...domain.service import service_of
from ..copy_terms import crowd, patience_ns, term_end_ns
from ..demand import ONE, Calls
from ..queue import GPU, Line, Shape
from ..snapshot import NodeView, Snapshot
from ..speed import run_ns
from .base import Placement
from .copies import Copies, Copy
from .waiting import OVERDUE_NS, Next, Waiting

BYPASS = 64  # a call is overtaken at most so many times by shorter ones of its kind
LOOK = 64  # calls of one kind looked at in one pass
WIDE = 8  # a new copy may be wide if so many times the calls expected gain its restore
LOSSES = 3  # the wait for busy copies is worth at most so many times what parking costs
RHO = (4, 5)  # the load that a copy should carry
AGAIN = 8  # weight of the calls expected per copy in the chance that a new copy is used again
OVER = (3, 4)  # a wide copy may be split when the load at its width exceeds this share of all GPUs

Spot = tuple[int, int, int, tuple[int, ...], NodeView]  # loss, last used, node, GPUs, node


def chance(calls: int) -> int:
    """That one comes at all, of so many expected; both in 1/ONE."""
    return (calls << 20) // (calls + ONE)


def place_services(view: Snapshot, placement: Placement, kept: Collection[int] = ()) -> int:
    """Starts calls of services; says when to look again. `kept`: nodes whose GPUs are for others.
    O(lines + kinds x (kinds + blocks) + calls looked at x log copies)."""
    return _Pass(view, placement, kept).go()


class _Pass:
    """One pass. Costs are counted once until a copy is opened."""

    def __init__(self, view: Snapshot, placement: Placement, kept: Collection[int]) -> None:
        self._view, self._now = view, view.now_ns
        self._copies = Copies(view, placement)
        self._demand, self._kept = view.ledger.demand, kept
        lines: dict[Shape, list[Line]] = {}
        for bay in view.ledger.ready.bays(GPU):
            for shape, line in bay.lines.items():
                lines.setdefault(shape._replace(name="", size=0, resizable=True), []).append(line)
        self._queues = {want: Waiting(view.ledger, some, self._now, BYPASS)
                        for want, some in lines.items()}
        self._crowd = crowd(self._queues)
        self._held: tuple[int, frozenset[int]] | None = None  # node and GPUs of a booked block
        self._drains = False  # the copies on the booked block take no further calls
        self._losses: dict[Copy, int] = {}
        self._crowded: dict[int, int] = {}
        self._stays = 0  # when the first copy that had to be left where it is may be parked

    def go(self) -> int:
        oldest = [(o, want) for want, q in self._queues.items() if (o := q.oldest()) is not None]
        oldest.sort(key=lambda x: (self._came(x[0]), x[0].turn))
        for first, want in oldest:
            if self._now - self._came(first) >= self._patience(want):
                self._rescue(want)
        for _, want in oldest:
            self._use_idle(want)
        self._bring_in([want for _, want in oldest])
        dues = [self._came(o) + self._patience(want) for want, q in self._queues.items()
                if (o := q.oldest()) is not None]
        dues += [self._stays] if self._stays else []
        return min((due for due in dues if due > self._now), default=0)

    def _bring_in(self, wants: list[Shape]) -> None:
        """New copies: one for each kind that has none, then one after another by turns."""
        for want in wants:
            if self._queues[want].n and not self._copies.usable(want):
                self._more(want)
        left = [want for want in wants if self._queues[want].n]
        while left:
            left = [want for want in left if self._more(want) and self._queues[want].n]

    def _use_idle(self, want: Shape) -> None:
        q = self._queues[want]
        while q.n:
            if q.n > 1:
                self._split(want)
            copy = self._idle(want)
            if copy is None or not q.n:
                return
            if q.n == 1 and self._widen(want, copy):
                continue
            head = self._take(want)
            self._copies.begin(copy, head.action, head.shape)

    # ---- small questions -----------------------------------------------------------------------

    def _came(self, first: Next) -> int:
        return self._view.ledger.actions[first.action].submitted_at

    def _patience(self, want: Shape) -> int:
        return patience_ns(self._view.ledger, want, self._crowd, self._copies.total)

    def _take(self, want: Shape) -> Next:
        head = self._queues[want].head()
        assert head is not None
        self._queues[want].take(head)
        return head

    def _calls(self, want: Shape) -> Calls:
        return self._demand.kinds[service_of(want.key), want.degrees]

    def _restore(self, service: str) -> int:
        return self._view.ledger.services[service].restore_ns

    def _open(self, want: Shape, spot: Spot, head: Next) -> None:
        self._queues[want].take(head)
        self._copies.open(spot[4], spot[3], head.action, head.shape)
        self._losses, self._crowded = {}, {}

    def _is_held(self, node: NodeView, gpus: tuple[int, ...]) -> bool:
        if node.node in self._kept:
            return True
        held = self._held
        return held is not None and held[0] == node.node and not held[1].isdisjoint(gpus)

    def _is_drained(self, copy: Copy) -> bool:
        if copy.node.node in self._kept:
            return True
        return self._drains and self._is_held(copy.node, copy.gpus)

    def _idle(self, want: Shape) -> Copy | None:
        """The widest idle copy for such calls."""
        idle = [c for c in self._copies.usable(want)
                if self._copies.is_idle(c) and not self._is_drained(c)]
        return min(idle, key=lambda c: (-c.size, c.node.node, c.gpus), default=None)

    def _loss(self, copy: Copy) -> int:
        """What parking an idle copy is expected to cost."""
        if copy not in self._losses:
            idle = sum(self._copies.is_idle(c) for c in self._copies.of[copy.service])
            calls = sum(self._demand.kinds[kind].expected(self._now)
                        for kind in self._demand.of_service.get(copy.service, ())
                        if copy.size in kind[1])
            loss = self._restore(copy.service) * chance(calls // max(1, idle)) >> 20
            others = len(self._copies.of[copy.service]) - 1
            if others:  # about the chance that all of them are busy
                busy = min(ONE, self._busy(copy) // others)
                loss = (loss * busy >> 20) * busy >> 20
            self._losses[copy] = loss
        return self._losses[copy]

    def _busy(self, copy: Copy) -> int:
        """How many copies like this one its service's calls keep busy, in 1/ONE."""
        total = 0
        for kind in self._demand.of_service.get(copy.service, ()):
            if copy.size in kind[1]:
                calls = self._demand.kinds[kind]
                run = run_ns(calls.work_ns, calls.serial, copy.size)
                total += calls.expected(self._now) * run // calls.horizon
        return total

    def _load(self, size: int) -> int:
        """GPUs that all kinds need if each call runs on `size` or what it can, in 1/ONE: the load,
        or the chance that a call comes at all."""
        total = 0
        for (_, degrees), calls in self._demand.kinds.items():
            d = max(x for x in degrees if x <= max(size, degrees[0]))
            expected = calls.steady(self._now)
            busy = expected * run_ns(calls.work_ns, calls.serial, d) // calls.horizon
            total += max(chance(expected), busy * RHO[1] // RHO[0]) * d
        return total

    def _wide(self, degrees: tuple[int, ...]) -> int:
        """The largest degree at which everything that is expected still fits."""
        best = degrees[0]
        for d in degrees[1:]:
            if d not in self._crowded:
                self._crowded[d] = self._load(d)
            if self._crowded[d] > self._copies.total * ONE:
                break
            best = d
        return best

    def _spot(self, want: Shape, size: int, force: bool = False,
              ignore: Shape | None = None) -> Spot | None:
        """The free block whose parking costs least, then the one used longest ago."""
        best: Spot | None = None
        for node, gpus, over in self._copies.blocks(want, size):
            if node.node in self._kept or self._is_held(node, gpus):
                continue
            if any(self._in_term(c) if force else self._keeps(c, ignore) for c in over):
                continue
            loss = sum(self._loss(c) for c in over)
            used = max((c.used_at for c in over), default=0)
            if best is None or (loss, used, node.node, gpus) < best[:4]:
                best = (loss, used, node.node, gpus, node)
        return best

    def _keeps(self, copy: Copy, ignore: Shape | None) -> bool:
        if copy.stays_until > self._now and (ignore is None
                                             or copy.service != service_of(ignore.key)):
            self._stays = min(self._stays or copy.stays_until, copy.stays_until)
            return True
        return self._wanted(copy, ignore)

    def _in_term(self, copy: Copy) -> bool:
        """Whether calls wait for a copy that not even a starved call may take from them yet."""
        oldest = min((self._came(o) for want, q in self._queues.items()
                      if service_of(want.key) == copy.service and copy.size in want.degrees
                      and (o := q.oldest()) is not None), default=0)
        end = term_end_ns(copy.since, self._restore(copy.service), oldest) if oldest else 0
        if end <= self._now:
            return False
        if self._copies.is_idle(copy):  # else its call's end is the next occasion
            self._stays = min(self._stays or end, end)
        return True

    def _wanted(self, copy: Copy, ignore: Shape | None) -> bool:
        return any(q.n and want != ignore and copy.size in want.degrees
                   and service_of(want.key) == copy.service for want, q in self._queues.items())

    # ---- the rules -----------------------------------------------------------------------------

    def _rescue(self, want: Shape) -> None:
        """Finds a block for a starved kind, or books one; its own copies serve a kind that has any.
        """
        if self._copies.usable(want):
            return
        head = self._queues[want].oldest()
        assert head is not None
        size = want.degrees[0]
        spot = self._spot(want, size, force=True)
        if spot is not None:
            self._open(want, spot, head)
        elif self._held is None and size > 1:
            blocks = [(self._last_term(n, gpus), max(self._free_at(n, gpu) for gpu in gpus),
                       n.node, gpus)
                      for n in self._copies.nodes if self._copies.may(n, want)
                      for gpus, _ in n.gpus.blocks[size]
                      if self._copies.may_stand(want, n, gpus)]
            if blocks:
                since, _, number, gpus = min(blocks)
                self._held, self._drains = (number, frozenset(gpus)), not since

    def _last_term(self, node: NodeView, gpus: tuple[int, ...]) -> int:
        """When the last of the terms that are not over on a block began; 0 if all are over."""
        found = (self._copies.at.get((node.node, gpu)) for gpu in gpus)
        return max((c.since for c in found if c is not None and self._in_term(c)), default=0)

    def _free_at(self, node: NodeView, gpu: int) -> int:
        copy = self._copies.at.get((node.node, gpu))
        if copy is None and not node.gpus.is_free(gpu):
            return self._now + OVERDUE_NS
        return self._copies.free_at(copy, self._now)

    def _split(self, want: Shape) -> None:
        """Remakes an idle copy that is wider than what is coming allows into narrower ones, if
        those who wait and the calls of two horizons end sooner: each^2/2 runs on it, each^2/2k
        narrow runs and a restore each on k."""
        q, restore = self._queues[want], self._restore(service_of(want.key))
        fit, calls = self._copies.usable(want), self._calls(want)
        for copy in fit:
            if (copy.size == want.degrees[0] or not self._copies.is_idle(copy)
                    or self._is_held(copy.node, copy.gpus)):
                continue
            top = self._wide(tuple(d for d in want.degrees if d < copy.size))
            stay = run_ns(calls.work_ns, calls.serial, copy.size)
            go, parts = run_ns(calls.work_ns, calls.serial, top), copy.size // top
            each = q.n // len(fit)
            coming = each + (2 * calls.expected(self._now) // len(fit) >> 20)
            load = self._load(copy.size) * RHO[0] // RHO[1]
            total = self._copies.total * ONE
            if each * stay <= restore or load * OVER[1] <= total * OVER[0]:
                continue
            if load > total or coming * stay > 2 * restore + coming * go // parts:
                for k in range(0, copy.size, top):
                    head = q.head()
                    if head is not None:
                        gpus = copy.gpus[k:k + top]
                        self._open(want, (0, 0, 0, gpus, copy.node), head)
                return

    def _widen(self, want: Shape, copy: Copy) -> bool:
        """The only call that waits would run on a copy narrower than the load allows: a wider one
        if it and the calls of two horizons gain twice the restore and what is parked."""
        top = self._wide(want.degrees)
        if top <= copy.size or self._load(top) > self._copies.total * ONE:
            return False
        calls, restore = self._calls(want), self._restore(service_of(want.key))
        gain = (run_ns(calls.work_ns, calls.serial, copy.size)
                - run_ns(calls.work_ns, calls.serial, top))
        gain = gain * (ONE + 2 * calls.expected(self._now)) >> 20
        if gain <= 2 * restore:
            return False
        spot = self._spot(want, top, ignore=want)  # its own idle copies may be remade
        if spot is None or gain <= 2 * restore + spot[0]:
            return False
        head = self._queues[want].head()
        assert head is not None
        self._open(want, spot, head)
        return True

    def _more(self, want: Shape) -> bool:
        """Brings in one copy for the oldest call, if somebody would wait too long."""
        q, restore = self._queues[want], self._restore(service_of(want.key))
        head = q.oldest()
        if head is None or self._spot(want, want.degrees[0]) is None:
            return False
        fit, calls = self._copies.usable(want), self._calls(want)
        likely = chance(AGAIN * calls.expected(self._now) // (1 + len(fit)))
        price = restore - (restore * likely >> 20)
        best = self._cheapest(want, head, price)
        if fit and not self._too_long(want, head, fit, price, best):
            return False
        self._open(want, best[1], head)
        return True

    def _cheapest(self, want: Shape, head: Next, price: int) -> tuple[int, Spot]:
        """The degree and block on which a new copy costs least."""
        action, top = self._view.ledger.actions[head.action].action, self._wide(want.degrees)
        best: tuple[int, Spot] | None = None
        calls, restore = self._calls(want), self._restore(service_of(want.key))
        often = WIDE * (ONE + calls.expected(self._now))
        narrow = run_ns(calls.work_ns, calls.serial, want.degrees[0])
        for d in want.degrees:
            gain = narrow - run_ns(calls.work_ns, calls.serial, d)
            if best is not None and gain * often >> 20 <= restore:
                break
            spot = self._spot(want, d) if d <= top else None
            if spot is not None:
                cost = price + self._copies.run_ns(action, d) + spot[0]
                if best is None or cost < best[0]:
                    best = (cost, spot)
        assert best is not None
        return best

    def _too_long(self, want: Shape, head: Next, fit: list[Copy], price: int,
                  best: tuple[int, Spot]) -> bool:
        """Whether a waiting call would rather have a new copy at the `best` cost and block: deals
        the waiting calls to the copies as they come free."""
        cost, loss = best[0], best[1][0]
        action = self._view.ledger.actions[head.action].action
        free = [(self._copies.free_at(c, self._now), i, self._copies.run_ns(action, c.size))
                for i, c in enumerate(fit)]
        heapq.heapify(free)
        calls = self._calls(want)
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
