"""Pure. Decides what may still start on a node whose allocation ends, and when the node is drained.

A node stops lending one margin before its allocation ends. The margin is `Ledger.margin_ns`, or a
third of the time that the allocation had left when the node joined, if that is less. An action
starts on the node only if it is expected to end before that time. From then on the node is drained:
no action starts, no session opens, and its sessions move or are closed as they become idle
(`moving`).

An action is expected to need the time of its profile on its fewest units; without a profile, twice
the mean of its class; but never more than its timeout. In a class of which nothing has ended it is
expected to need its timeout, or a second if it has none. Such a timeout is ignored if it is longer
than the whole time for which the node lends; a second counts instead.

A time limit may be changed while the job runs (`scontrol update TimeLimit`), and Slurm does not
report that. So the driver asks Slurm again at the times that `next_look` names, and hands the
answer in as `AllocationEndTold`. The last query falls just before the drain. The drain waits for
the answer, since a drain closes idle sessions at once and a later end does not open them again.
`hold_until` bounds this wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...domain import event as ev
from ...domain.service import service_of
from ..state.estimator import PRIOR, UNKNOWN_NS
from ..state.queue import ActionShape
from ..state.speed import most_of, run_ns
from .background import drained
from .moving import migrate_or_close
from .session_life import OPEN_SESSION

if TYPE_CHECKING:
    from ..state.ledger import Ledger, NodeEntry


_SECOND = 10**9
LOOK_LEAST_NS = 60 * _SECOND  # least time between two queries, except shortly before the drain
LOOK_MOST_NS = 3600 * _SECOND
LOOK_AHEAD_NS = 5 * _SECOND  # the last query is made this long before the drain
_HOLD_MOST_NS = 15 * _SECOND


def next_look(looked_at: int, lends: int, ends_at: int, gap_ns: int) -> int:
    """When to ask Slurm again for the end of an allocation.

    Each query comes after half of the time that is left until the drain, but at least
    `LOOK_LEAST_NS` and at most `LOOK_MOST_NS` after the query before; then there is a query shortly
    before the drain and one just before it. After the drain, each comes after half of the time
    until the end. A job of an hour costs ten queries, one of a day about thirty.

    Args:
        looked_at: when Slurm was last asked, or when the node joined (epoch ns).
        lends: the node's `lends_until`.
        ends_at: when its allocation ends.
        gap_ns: least time between two queries that the budget of Slurm calls allows.
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
    return looked_at + LOOK_LEAST_NS  # it outlived its end: the time limit has moved


def hold_until(lends: int, ends_at: int) -> int:
    """The time until which a drain waits for Slurm's answer, at most half of the margin."""
    return lends + min(_HOLD_MOST_NS, (ends_at - lends) // 2)


def lends_until(ends_at: int, joined_at: int, margin_ns: int) -> int:
    """When a node stops lending (epoch ns); 0 if no end is known."""
    if not ends_at:
        return 0
    return max(1, ends_at - min(margin_ns, max(0, ends_at - joined_at) // 3))


def next_end(ledger: Ledger) -> int:
    """When the next node is drained for its allocation's end (epoch ns); 0 for never. O(nodes)."""
    return min((n.drain_at for n in ledger.up_nodes() if n.drain_at), default=0)


def ending(ledger: Ledger, now: int) -> list[ev.Event]:
    """Events for the nodes that are to be drained now, and for the sessions without leases on nodes
    that are drained. O(1) while no node is drained or due.
    """
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
            if session.background:
                events += drained(ledger, session, now)
            elif session.state in OPEN_SESSION and not session.leases:
                events += migrate_or_close(ledger, node, session, now)
    return events


class Endings:
    """Tells which actions still end before the allocations of nodes do, at one time. The expected
    time of a shape is looked up once.
    """

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger, self._now = ledger, now
        self._needs: dict[ActionShape, tuple[int, bool]] = {}

    def fits(self, node: NodeEntry, shape: ActionShape) -> bool:
        """Whether an action of this shape should be over before the node stops lending. O(1)."""
        until = node.lends_until
        return not until or self.need_ns(node, shape) <= until - self._now

    def need_ns(self, node: NodeEntry, shape: ActionShape) -> int:
        """How long an action of this shape is expected to need on the node."""
        need, by_limit = self._needs.get(shape) or self._estimate(shape)
        if by_limit and need > node.lends_until - node.joined_at:
            return UNKNOWN_NS
        return need

    def _estimate(self, shape: ActionShape) -> tuple[int, bool]:
        """The expected need of an action of this shape, and whether only its timeout tells it."""
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
