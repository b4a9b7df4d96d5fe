"""Orders waiting actions for `elastic`: shortest first, and none is overtaken without bound. Pure.

Between clients, and between the groups of one client's actions, the order is that of fair queueing
(`fair_order`). Within one such list and one round of its trajectories, actions with the smallest
expected work come first. Work is compared in buckets of an eighth of an octave; inside a bucket the
order tag decides.

Shortest first alone could starve a long action. So the action with the lowest order tag of a list
comes first once it was overtaken BYPASS times by later ones of its queue shard, or has waited for
OVERDUE_NS. Where much work waits, all actions would soon be so old, and the order would be that of
arrival, which makes the mean completion time long. So for CPUs, `Backlog` allows that an action is
overtaken for as long as it would wait in order of arrival.

Under `elastic` with a TAIL above 0 there is no `Backlog`, and the action with the lowest order tag
comes first once it has waited for AGED_NS; units are then taken for it by value only. The queue is
read only.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ....domain.ids import client_of
from ...state.fair_order import Rounds, arrival_of, round_of
from ...state.ledger import Ledger
from ...state.queue import GPU, ActionShape, QueueShard, ShapeQueue
from ...state.speed import most_of, octaves
from ...state.tenant_use import MEMORY, TenantTurns
from ..snapshot import Snapshot

BYPASS = 256
OVERDUE_NS = 20_000_000_000
AGED_NS = 3_000_000_000


def rank(ledger: Ledger, shape: ActionShape) -> int:
    """Returns the bucket of the work that an action of this shape is expected to take."""
    if shape.size:
        return shape.size
    return octaves(ledger.estimator.mean(shape.key, shape.name, shape.degrees))


def is_overdue(ledger: Ledger, action: int, now: int, more: int = 0, bypass: int = BYPASS) -> bool:
    """Returns whether the action may not be overtaken any more, but for what a `Backlog` allows.

    `more` is how many actions have overtaken it in this cycle. O(1).
    """
    return (now - ledger.actions[action].submitted_at >= OVERDUE_NS
            or ledger.ready.bypass_count(action) + more >= bypass)


class Backlog:
    """Says how long an action would wait for the CPUs of a node in order of arrival. The work that
    waits is added up when it is first asked for.

    Args:
        ledger: knows what is expected of each action.
        queues: the shape queues of the actions that may start on the node.
        units: the CPUs of the node.
        nodes: how many nodes share the actions that may start on any of them.
    """

    def __init__(self, ledger: Ledger, queues: Iterable[ShapeQueue], units: int, nodes: int
                 ) -> None:
        self._ledger, self._queues = ledger, queues
        self._units, self._nodes = max(1, units), nodes
        self._work_ns: defaultdict[int, int] | None = None  # by client
        self._whole_ns = 0

    def wait_ns(self, action: int) -> int:
        """Returns how long an action would wait if its client's others were all served before it,
        in turn with as many of each other client. O(queues) in the first call, then O(1).
        """
        ledger, work = self._ledger, self._work_ns
        if work is None:
            work = self._work_ns = defaultdict(int)
            for queue in self._queues:
                count = len(queue) if queue.shard.node else -(-len(queue) // self._nodes)
                work[queue.shard.share.client] += count * most_of(rank(ledger, queue.shape))
            self._whole_ns = sum(work.values())
        ready = ledger.ready
        own = most_of(rank(ledger, ready.shape_of(action)))
        mine = work[ready.shard_of(action).share.client] - own
        return max(0, min(self._whole_ns - own, mine * len(work))) // self._units


class Next(NamedTuple):
    """The action that comes next.

    Attributes:
        action: id of the action.
        shape: its shape.
        turn: its order tag.
        overdue: whether it is next because nothing may overtake it any more.
        aged: whether it is next because it has the lowest order tag and has waited `aged_ns`, or
            is overdue.
    """

    action: int
    shape: ActionShape
    order_tag: int
    overdue: bool
    aged: bool


class Waiting:
    """The waiting actions of some shape queues in order, during one cycle.

    It is built in O(queues); each step costs O(log queues).

    Args:
        ledger: knows what is expected of each action, and how long it has waited.
        queues: the shape queues whose actions are ordered.
        now: the present time, epoch ns.
        bypass: how often an action may be overtaken.
        aged_ns: the wait after which the action with the lowest order tag comes first; 0 for none.
        turns: the order of the tenants, which is drawn down; None if there is nothing to compare.
        backlog: how long an action may be overtaken where much work waits; None for no longer
            than `bypass` and OVERDUE_NS say.
    """

    def __init__(self, ledger: Ledger, queues: Iterable[ShapeQueue], now: int,
                 bypass: int = BYPASS, aged_ns: int = 0, turns: TenantTurns | None = None,
                 backlog: Backlog | None = None) -> None:
        self._ledger, self._turns = ledger, turns
        # memory and GPUs of the actions that were charged, by tenant and resource
        self._beside: defaultdict[tuple[str, str], int] = defaultdict(int)
        found: dict[tuple[int, int], list[ShapeQueue]] = {}
        for queue in queues:
            whose = queue.shard.share.client, queue.shard.group
            if whose in found:
                found[whose].append(queue)
            else:
                found[whose] = [queue]
        self._lists: dict[tuple[int, int], _List] = {}
        self.n = 0
        for whose, some in found.items():
            self._lists[whose] = each = _List(ledger, some, now, bypass, aged_ns, backlog)
            self.n += each.n
        # In most cycles there is one list, which needs no `Rounds`.
        self._rounds = Rounds(((some[0].shard.share, some[0].shard.group, self._lists[whose])
                              for whose, some in found.items()), turns
                             ) if len(found) > 1 else None
        self._alone = each if len(found) == 1 else None

    def _current(self) -> _List | None:
        return self._rounds.current() if self._rounds is not None else None

    def oldest(self) -> Next | None:
        """Returns the oldest action, by order tag, of the client and group that are next."""
        each = self._alone or self._current()
        return each.oldest() if each is not None else None

    def head(self) -> Next | None:
        """Returns the action that comes next; None when none is left."""
        each = self._alone or self._current()
        return each.head() if each is not None else None

    def each_oldest(self) -> list[Next]:
        """Returns the action with the lowest order tag of each client and group."""
        return [first for each in self._lists.values() if (first := each.oldest()) is not None]

    @property
    def several(self) -> bool:
        """Whether more than one client waits."""
        return self._rounds is not None and self._rounds.several

    def is_first(self) -> bool:
        """Returns whether several clients wait and the current one was not served yet."""
        return self._rounds is not None and self._rounds.is_first()

    def take(self, chosen: Next) -> None:
        """Removes an action that starts or that is passed over."""
        self.n -= 1
        if self._rounds is None:
            assert self._alone is not None, "no action is left"
            return self._alone.take(chosen)
        shard: QueueShard = self._ledger.ready.shard_of(chosen.action)
        self._lists[shard.share.client, shard.group].take(chosen)
        self._rounds.charge(shard.share.counted.get(chosen.action, 0))

    def skip_shape(self, shape: ActionShape) -> None:
        """Passes over all actions of a shape that cannot start in this cycle."""
        for each in self._lists.values():
            each.skip_shape(shape)

    def skip_shape_of(self, chosen: Next) -> None:
        """Passes over all actions of an action's tenant that have its shape, in this cycle."""
        tenant = self._ledger.ready.shard_of(chosen.action).share.tenant
        for each in self._lists.values():
            if each.tenant == tenant:
                each.skip_shape(chosen.shape)

    def allows(self, view: Snapshot, chosen: Next) -> bool:
        """Returns whether the limits of an action's tenant allow its smallest size. If they do not,
        the tenant's actions of this shape are passed over in this cycle. If only its CPUs are
        lacking and it may not be overtaken, all of the tenant's are: else smaller ones would take
        each CPU that comes free. Memory and GPUs that sessions hold come free only when others run.
        """
        turns, shape = self._turns, chosen.shape
        if turns is None:
            return True
        tenant = turns.tenant_of(client_of(chosen.action))
        least = 0 if shape.session else next((d for d in shape.degrees if d), 1)
        beside = ((MEMORY, shape.mem_mib), (GPU, shape.gpus))
        rest = all(units + self._beside[tenant, resource] <= of.room(tenant)
                   for resource, units in beside if units and (of := view.turns(resource)))
        if rest and least <= turns.room(tenant):
            return True
        if (rest and chosen.overdue
                and any(view.fits(node, shape, 0) for node in view.candidates(shape))):
            self.leave_out(tenant)
        else:
            self.skip_shape_of(chosen)
        return False

    def charge(self, chosen: Next, units: int) -> None:
        """Counts for its tenant the units, memory and GPUs that an action is to be given."""
        if self._turns is not None:
            tenant = self._turns.tenant_of(client_of(chosen.action))
            self._turns.charge(tenant, units)
            self._beside[tenant, MEMORY] += chosen.shape.mem_mib
            self._beside[tenant, GPU] += chosen.shape.gpus

    def leave_out(self, tenant: str) -> None:
        """Passes over all actions of a tenant, which may hold no more units in this cycle."""
        for each in self._lists.values():
            if each.tenant == tenant:
                self.n -= each.n
                each.leave_out()


class _List:
    """The actions of one client and group in order, during one cycle.

    Two heaps are kept with one entry for each shape queue: `_ahead` in the order of starting, and
    `_oldest` in the order of tags. Entries that were taken or skipped are removed lazily.
    """

    def __init__(self, ledger: Ledger, queues: Iterable[ShapeQueue], now: int,
                 bypass: int, aged_ns: int, backlog: Backlog | None) -> None:
        self._ledger, self._now, self._bypass, self._aged_ns = ledger, now, bypass, aged_ns
        self._backlog = backlog
        # (round, bucket, order tag, action, shape queue, rest of the shape queue)
        self._ahead: list[tuple[int, int, int, int, ShapeQueue,
                                Iterator[tuple[int, int]] | None]] = []
        self._oldest: list[tuple[int, int, ShapeQueue, Iterator[tuple[int, int]] | None]] = []
        self.n = 0
        for queue in queues:
            order_tag = queue.actions.first()
            action = queue.actions.at[order_tag]
            self._ahead.append((round_of(order_tag), rank(ledger, queue.shape), order_tag, action,
                                queue, None))
            self._oldest.append((order_tag, action, queue, None))
            self.n += len(queue)
        heapq.heapify(self._ahead)
        heapq.heapify(self._oldest)
        self.tenant = queue.shard.share.tenant
        self._left_out = False
        self._gone: set[int] = set()
        self._skipped: set[ActionShape] = set()
        self._passes = 0

    def oldest(self) -> Next | None:
        """Returns the action with the lowest order tag; None when none is left."""
        if self._left_out:
            return None
        heap = self._oldest
        while heap and (heap[0][0] in self._gone or heap[0][2].shape in self._skipped):
            order_tag, _, queue, rest = heapq.heappop(heap)
            if queue.shape not in self._skipped:
                rest = _after(queue, rest)
                if (found := next(rest, None)) is not None:
                    heapq.heappush(heap, (*found, queue, rest))
        if not heap:
            return None
        order_tag, action, queue, _ = heap[0]
        due = is_overdue(self._ledger, action, self._now, self._passes, self._bypass)
        waited = self._now - self._ledger.actions[action].submitted_at
        if due and self._backlog is not None:
            due = waited >= self._backlog.wait_ns(action)
        return Next(action, queue.shape, order_tag, due, due or 0 < self._aged_ns <= waited)

    def head(self) -> Next | None:
        """Returns the action that comes next; None when none is left."""
        first = self.oldest()
        if first is None or first.aged:
            return first
        heap = self._ahead
        while heap[0][2] in self._gone or heap[0][4].shape in self._skipped:
            _, bucket, _, _, queue, rest = heapq.heappop(heap)
            if queue.shape not in self._skipped:
                rest = _after(queue, rest)
                if (found := next(rest, None)) is not None:
                    heapq.heappush(heap, (round_of(found[0]), bucket, *found, queue, rest))
        _, _, order_tag, action, queue, _ = heap[0]
        return Next(action, queue.shape, order_tag, False, False)

    def rank(self) -> tuple[int, int]:
        """Returns the next action's bucket (0 if it is aged) and its place by arrival."""
        first = self.head()
        assert first is not None, "no action is left"
        return 0 if first.aged else self._ahead[0][1], arrival_of(first.order_tag)

    def take(self, chosen: Next) -> None:
        first = self.oldest()
        self._passes += first is not None and first.order_tag != chosen.order_tag
        self._gone.add(chosen.order_tag)
        self.n -= 1

    def skip_shape(self, shape: ActionShape) -> None:
        self._skipped.add(shape)

    def leave_out(self) -> None:
        self.n, self._left_out = 0, True


def _after(queue: ShapeQueue, rest: Iterator[tuple[int, int]] | None) -> Iterator[tuple[int, int]]:
    if rest is None:
        rest = queue.actions.walk()
        next(rest)
    return rest
