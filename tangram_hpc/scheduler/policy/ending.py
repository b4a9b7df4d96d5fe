"""Pure. The end of allocations: what may still start on a node, and when a node is drained.

Law: a node lends until `Ledger.margin_ns` before its allocation ends (a third of what was left when
it joined, if that is less). Nothing starts on it that is
not expected to be over by then; from then on it is drained: nothing starts, no session opens, and
the sessions on it move or are closed as they come to rest (`moving`). What an action is expected to
need: its profile on its fewest units, else twice the mean of its class if any of that has ended,
never more than its timeout; of a class that nobody has seen its timeout, or a second without one. A
timeout that is longer than the node was ever to be lent says nothing.

A time limit may be changed while the job runs (`scontrol update TimeLimit`); Slurm tells nobody.
So the driver asks Slurm again at the times that `next_look` names, and hands the answer in as
`AllocationEndTold`. The last question falls just before the drain, which waits for the answer, but
not for long: a drain closes idle sessions at once, and taking it back does not open them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...domain import event as ev
from ...domain.service import service_of
from ..state.estimator import PRIOR, UNKNOWN_NS
from ..state.queue import ActionShape
from ..state.speed import most_of, run_ns
from .moving import migrate_or_close
from .session_life import OPEN_SESSION

if TYPE_CHECKING:
    from ..state.ledger import Ledger, NodeEntry


_SECOND = 10**9
LOOK_LEAST_NS = 60 * _SECOND  # between two questions while there is time
LOOK_MOST_NS = 3600 * _SECOND
LOOK_AHEAD_NS = 5 * _SECOND  # the last question before a drain is asked so long before it
_HOLD_MOST_NS = 15 * _SECOND


def next_look(looked_at: int, lends: int, ends_at: int, gap_ns: int) -> int:
    """When to ask Slurm again for the end of an allocation.

    Half of what is left until the drain, at least `LOOK_LEAST_NS` and at most `LOOK_MOST_NS` after
    the last question; then shortly before the drain; then just before it. After that at half of
    what is left until the end. An hour's job costs ten questions, a day's about thirty.

    Args:
        looked_at: when Slurm was last asked, or when the node joined (epoch ns).
        lends: the node's `lends_until`.
        ends_at: when its allocation ends.
        gap_ns: least time between two questions that the budget of Slurm calls allows.
    """
    last = lends - LOOK_AHEAD_NS
    before = last - gap_ns - LOOK_AHEAD_NS
    if looked_at + gap_ns <= before:
        wait = min(max((lends - looked_at) // 2, LOOK_LEAST_NS), LOOK_MOST_NS)
        return looked_at + wait if looked_at + wait + gap_ns <= before else before
    if looked_at < last:
        return last
    if looked_at < ends_at:
        return looked_at + max((ends_at - looked_at) // 2, gap_ns)
    return looked_at + LOOK_LEAST_NS  # it lives longer than it may: the limit must have moved


def hold_until(lends: int, ends_at: int) -> int:
    """Until when a drain waits for Slurm's answer: at most half of the margin."""
    return lends + min(_HOLD_MOST_NS, (ends_at - lends) // 2)


def lends_until(ends_at: int, joined_at: int, margin_ns: int) -> int:
    """Until when a node lends (epoch ns); 0 for no known end."""
    if not ends_at:
        return 0
    return max(1, ends_at - min(margin_ns, max(0, ends_at - joined_at) // 3))


def next_end(ledger: Ledger) -> int:
    """When the next node is drained for its end; 0 for never. O(nodes)."""
    return min((n.drain_at for n in ledger.up_nodes() if n.drain_at), default=0)


def ending(ledger: Ledger, now: int) -> list[ev.Event]:
    """Nodes that lend no more, and the sessions at rest on those that are drained. O(1) while no
    node is drained or due."""
    events: list[ev.Event] = []
    if 0 < ledger.next_end <= now:
        for node in ledger.up_nodes():
            if 0 < node.drain_at <= now:
                left = max(0, node.spec.ends_at_ns - now)
                events.append(ev.NodeDraining(
                    now, node.node, f"its allocation ends in {left / 1e9:.0f} s", True))
    for number in ledger.draining:
        node = ledger.nodes[number]
        for session_id in node.sessions:
            session = ledger.sessions[session_id]
            if session.state in OPEN_SESSION and not session.leases:
                events += migrate_or_close(ledger, node, session, now)
    return events


class Endings:
    """What still fits on nodes before their allocations end, at one instant; needs are looked up
    once a shape."""

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger, self._now = ledger, now
        self._needs: dict[ActionShape, tuple[int, bool]] = {}

    def fits(self, node: NodeEntry, shape: ActionShape) -> bool:
        """Whether an action of this shape should be over before the node lends no more. O(1)."""
        until = node.lends_until
        return not until or self.need_ns(node, shape) <= until - self._now

    def need_ns(self, node: NodeEntry, shape: ActionShape) -> int:
        """How long it is expected to need there."""
        need, by_limit = self._needs.get(shape) or self._look(shape)
        if by_limit and need > node.lends_until - node.joined_at:
            return UNKNOWN_NS
        return need

    def _look(self, shape: ActionShape) -> tuple[int, bool]:
        """What it needs, and whether only its timeout says so."""
        ledger = self._ledger
        limit = most_of(shape.limit) if shape.limit else 0
        service = ledger.services.get(service_of(shape.key))
        restore = service.restore_ns if service is not None else 0
        units = max(1, shape.degrees[0])
        if shape.size:
            need = run_ns(most_of(shape.size), PRIOR if shape.degrees[-1] > 1 else 0, units)
        elif ledger.estimator.seen_class(shape.key, shape.name):
            mean = ledger.estimator.mean(shape.key, shape.name, shape.degrees)
            need = run_ns(2 * mean, PRIOR if shape.degrees[-1] > 1 else 0, units)
        else:
            found = self._needs[shape] = (restore + (limit or UNKNOWN_NS), bool(limit))
            return found
        found = self._needs[shape] = (restore + (min(need, limit) if limit else need), False)
        return found
