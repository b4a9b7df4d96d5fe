"""Decides on which nodes a session may open, when a fork may begin, and why a session waits. Pure.

A node is eligible for a session if it belongs to the session's component and one of its isolation
backends serves the session. Free memory and free cores are not considered here.

A fork begins with its origin's files. So it opens only on its origin's node, and only between two
of the origin's actions, after all actions that its client had submitted to the origin before the
fork.
"""

from __future__ import annotations

from ...domain.ids import client_of
from ...domain.isolation import backend_for
from ...domain.session import SessionSpec
from ...domain.states import SessionState
from ..policy.tenant_limits import session_limit_reason
from ..state.ledger import Ledger, NodeEntry, SessionEntry


def eligible_nodes(ledger: Ledger, spec: SessionSpec) -> list[NodeEntry]:
    """Returns the nodes on which a session could open, whatever is free, in order of joining."""
    nodes = ledger.up_nodes()
    if spec.origin:
        origin = ledger.sessions.get(spec.origin)
        nodes = [n for n in nodes if origin is not None and n.node == origin.node]
    return [n for n in nodes
            if n.spec.serves(spec.component) and backend_for(n.spec, spec)]


def may_fork(origin: SessionEntry, fork: int) -> bool:
    """Returns whether a fork of this session may begin now.

    The ids of one client grow with each submission: an action of the fork's client with a smaller
    id than the fork was submitted before the fork. Actions of other clients have no order with it.
    """
    first = origin.waiting.first_of(client_of(fork))
    return origin.state is SessionState.IDLE and not 0 < first < fork


def session_reason(ledger: Ledger, session: SessionEntry, reserve: int) -> str:
    """Returns why a session that is not placed waits, as a Reason of one word.

    Args:
        ledger: the scheduler's state.
        session: a session without a home node.
        reserve: CPUs that the session holds while it is open, as the placer says.
    """
    spec = session.spec
    if not ledger.up_nodes():
        return "AllocationEnds" if ledger.draining else "ReqNodeNotAvail"
    origin = ledger.sessions.get(spec.origin)
    if origin is not None and not may_fork(origin, spec.id):
        return "OriginBusy"
    if why := session_limit_reason(ledger, spec, reserve):
        return why
    roomy = [n for n in eligible_nodes(ledger, spec) if spec.mem_mib <= n.room_mib]
    if not roomy:
        return "Memory"
    return "Priority" if any(reserve <= n.cores.free for n in roomy) else "Resources"
