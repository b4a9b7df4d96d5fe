"""Opens waiting sessions on nodes: each where there are fewest sessions for a CPU. Pure.

Problem: a session that needs most of a node's memory finds no room while small sessions come and
go, since each small one takes the room that another has left. If instead all nodes that could hold
the large session are kept from the sessions behind it, the whole job waits for one session
(simulated: the others' mean ACT 1.6 -> 3.6 s with three large sessions on eight nodes).

Idea: a session that finds no room keeps one node from all sessions behind it, the one that lacks
least. Nothing opens there until the session does, so the room only grows; the other nodes go on.
In each cycle the choice is made anew, in the queue's order, so the first sessions of the queue have
a node kept before those behind them. At most half of the nodes, and at most `KEPT_MOST`, are kept.
"""

from __future__ import annotations

from ....domain.session import SessionSpec
from ..snapshot import NodeView, Snapshot
from .base import Placement, SessionPlacement

KEPT_MOST = 8  # nodes that are kept for sessions that wait
BLOCKED_MOST = 64  # sessions without room after which a cycle looks at no more sessions


def open_by_load(view: Snapshot, placement: Placement, reserve: int = 0) -> None:
    """Opens waiting sessions in their order, each where there are fewest sessions per CPU.

    A session without room keeps one of its eligible nodes from all sessions behind it. O(openings x
    nodes); sessions that cannot fit because a smaller one did not cost O(1).

    Args:
        view: the amounts of the nodes, which this function draws down.
        placement: gets the openings.
        reserve: CPUs that each session holds while it is open.
    """
    kept: set[int] = set()
    kept_most = min(KEPT_MOST, max(1, len(view.nodes) // 2))
    least: dict[tuple[str, str, str, bool], int] = {}  # the smallest memory that found no room
    blocked = 0
    for session_id in view.ledger.session_queue:
        spec = view.ledger.sessions[session_id].spec
        want = (spec.component, spec.backend, spec.image, spec.trusted)
        fitting = [] if not spec.origin and spec.mem_mib >= least.get(want, spec.mem_mib + 1) else [
            n for n in view.eligible_nodes(spec)
            if n.node not in kept and view.room_for(n, spec, reserve)]
        if fitting:
            best = min(fitting, key=lambda n: ((n.sessions + 1) / max(1, n.cpus), n.node))
            best.sessions += 1
            best.free_mem_mib -= spec.mem_mib
            best.free_cpus -= reserve
            placement.openings.append(SessionPlacement(session_id, best.node, reserve))
            continue
        blocked += 1
        if not spec.origin:
            least[want] = spec.mem_mib
        if len(kept) < kept_most:
            _keep_one(view, spec, reserve, kept)
        if blocked == BLOCKED_MOST or len(kept) == len(view.nodes):
            return


def _keep_one(view: Snapshot, spec: SessionSpec, reserve: int, kept: set[int]) -> None:
    """Adds the node that lacks least for a session to `kept`."""
    def lacks(node: NodeView) -> tuple[int, int, int]:
        return (max(0, spec.mem_mib - node.free_mem_mib), max(0, reserve - node.free_cpus),
                node.node)

    able = [n for n in view.eligible_nodes(spec) if n.node not in kept
            and spec.mem_mib <= n.entry.spec.mem_mib and reserve <= n.cpus]
    if able:
        kept.add(min(able, key=lacks).node)
