"""Opens waiting sessions on nodes: each where there are fewest sessions for a CPU. Pure.

Problem: a session that needs most of a node's memory finds no room while small sessions come and
go, since each small one takes the room that another has left. If instead all nodes that could hold
the large session are kept from the sessions behind it, the whole job waits for one session
(simulated: the others' mean ACT 1.6 -> 3.6 s with three large sessions on eight nodes).

Idea: a session that finds no room keeps one node from all sessions behind it, the one that lacks
least. Nothing opens there until the session does, so the room only grows; the other nodes go on.
In each cycle the choice is made anew, in the queue's order, so the first sessions of the queue have
a node kept before those behind them. Of the nodes that could hold a session, at most half, and at
most `KEPT_MOST`, are kept when it asks for one.

A session that begins from a snapshot opens on a node that has the snapshot, as long as that node
has hardly more sessions than the least loaded one; elsewhere the snapshot would have to be packed
and fetched first. Otherwise it opens by load like every other session, so a group spreads over the
job.

Under `elastic`, where several tenants share the nodes, memory is kept for those whose sessions held
it lately, because nobody takes the memory of an open session back (`kept_units`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ....domain.ids import client_of
from ....domain.session import SessionSpec
from ...state.ledger import SessionEntry
from ...state.queue import CPU
from ...state.tenant_use import MEMORY, copy_of
from ..snapshot import NodeView, Snapshot
from .base import Placement, SessionPlacement
from .kept_units import KeptUnits
from .recent_use import PERIODS_NS

KEPT_MOST = 8  # nodes that are kept, of those that could hold a session
BLOCKED_MOST = 64  # sessions of a kind without room after which its nodes are closed for the cycle
# Nobody knows how long a session will stay open, so the longest period counts for what is kept.
EXPECTED_NS = PERIODS_NS[-1]
# Part of its CPUs by which the load of a node with the snapshot may be above the least one.
AHEAD = 0.125


@dataclass(slots=True)
class _Kind:
    """Sessions that may open on the same nodes, in one cycle.

    Attributes:
        least: the smallest memory that found no room, in MiB; larger sessions find none either.
        blocked: how many sessions found no room.
        enough: whether no further node is kept for these sessions.
    """

    least: int
    blocked: int = 0
    enough: bool = False


class _TenantsRoom:
    """What the tenants of waiting sessions may still open in one cycle.

    Args:
        view: the snapshot of this cycle.
        reserve: CPUs that each session holds while it is open.
        kept: the memory that is kept for tenants; None for none.

    Attributes:
        memory: the order of the tenants in memory; None if there is nothing to compare.
        left_out: tenants of which many sessions were told to leave memory to others.
    """

    def __init__(self, view: Snapshot, reserve: int, kept: KeptUnits | None) -> None:
        self.memory, self._cores = view.turns(MEMORY), view.turns(CPU)
        self.left_out: set[str] = set()
        self._now, self._reserve, self._kept = view.now_ns, reserve, kept
        self._held_back: Counter[str] = Counter()

    def may_open(self, session: SessionEntry, tenant: str) -> bool:
        """Returns whether the limits of its tenant, and what others keep, let a session open."""
        mem_mib = session.spec.mem_mib
        if self.memory is not None and self._cores is not None and (
                mem_mib > self.memory.room(tenant) or self._reserve > self._cores.room(tenant)):
            return False
        if self._kept is None or self._kept.may_take(tenant, mem_mib, EXPECTED_NS,
                                                     self._now - session.requested_at):
            return True
        self._held_back[tenant] += 1
        if self._held_back[tenant] == BLOCKED_MOST:
            self.left_out.add(tenant)
        return False

    def opened(self, session: SessionEntry, tenant: str) -> None:
        """Counts the memory and CPUs of a session that opens for its tenant."""
        if self._kept is not None:
            self._kept.take(tenant, session.spec.mem_mib)
        if self.memory is not None and self._cores is not None:
            self.memory.charge(tenant, session.spec.mem_mib)
            self._cores.charge(tenant, self._reserve)


def open_by_load(view: Snapshot, placement: Placement, reserve: int = 0,
                 kept_memory: KeptUnits | None = None) -> None:
    """Opens waiting sessions in their order, each where there are fewest sessions per CPU.

    A session without room keeps one of its eligible nodes from all sessions behind it. O(openings x
    nodes + waiting sessions); the walk ends early when all nodes are kept, or closed since
    `BLOCKED_MOST` sessions of one kind found no room on them.

    Args:
        view: the amounts of the nodes, which this function draws down.
        placement: gets the openings.
        reserve: CPUs that each session holds while it is open.
        kept_memory: the memory that is kept for tenants; None for none.
    """
    if not view.ledger.session_queue:
        return
    room = _TenantsRoom(view, reserve, kept_memory)
    kept: set[int] = set()
    shut: set[int] = set()  # nodes that are kept or closed
    kinds: dict[tuple[str, str, str, bool], _Kind] = {}
    sessions = view.ledger.sessions
    for session_id in view.ledger.session_queue.walk(
            copy_of(room.memory), lambda each: sessions[each].spec.mem_mib, room.left_out):
        session = sessions[session_id]
        spec, tenant = session.spec, view.ledger.tenants.tenant_of(client_of(session_id))
        if not room.may_open(session, tenant):
            continue
        want = (spec.component, spec.backend, spec.image, spec.trusted)
        kind = None if spec.origin else kinds.get(want)
        if kind is None or spec.mem_mib < kind.least:
            if node := _roomy(view, session, reserve, kept):
                placement.openings.append(SessionPlacement(session_id, node.node, reserve))
                room.opened(session, tenant)
                continue
            # a fork is a kind of its own
            kind = _Kind(spec.mem_mib) if spec.origin else kinds.setdefault(want, _Kind(0))
            kind.least = spec.mem_mib
        kind.blocked += 1
        if not kind.enough:
            kind.enough = not _keep_one(view.eligible_nodes(spec), spec, reserve, kept)
            shut |= kept
        if kind.blocked == BLOCKED_MOST:
            shut.update(n.node for n in view.eligible_nodes(spec))
        if len(shut) == len(view.nodes):
            return


def _roomy(view: Snapshot, session: SessionEntry, reserve: int, kept: set[int]
           ) -> NodeView | None:
    """Returns the least loaded node that has room for a session, and takes the room there. A node
    that has the session's snapshot is taken before it while it has at most `AHEAD` of its CPUs more
    sessions, and at least one."""
    spec = session.spec
    fitting = [n for n in view.eligible_nodes(spec)
               if n.node not in kept and view.room_for(n, spec, reserve)]
    if not fitting:
        return None

    def load(node: NodeView, more: int = 1) -> float:
        return (node.sessions + more) / max(1, node.cpus)

    best = min(fitting, key=lambda n: (load(n), n.node))
    if session.snapshot_nodes:
        holders = [n for n in fitting if n.node in session.snapshot_nodes
                   and load(n, 0) <= load(best, 0) + max(AHEAD, 1 / max(1, n.cpus))]
        best = min(holders or [best], key=lambda n: (load(n), n.node))
    best.sessions += 1
    best.free_mem_mib -= spec.mem_mib
    best.free_cpus -= reserve
    return best


def _keep_one(eligible: list[NodeView], spec: SessionSpec, reserve: int, kept: set[int]) -> bool:
    """Adds the node that lacks least for a session to `kept`, unless enough of the nodes that could
    hold the session are kept. Returns whether it did."""
    def lacks(node: NodeView) -> tuple[int, int, int]:
        return (max(0, spec.mem_mib - node.free_mem_mib), max(0, reserve - node.free_cpus),
                node.node)

    able = [n for n in eligible if spec.mem_mib <= n.entry.spec.mem_mib and reserve <= n.cpus]
    left = [n for n in able if n.node not in kept]
    if not left or len(able) - len(left) >= min(KEPT_MOST, max(1, len(able) // 2)):
        return False
    kept.add(min(left, key=lacks).node)
    return True
