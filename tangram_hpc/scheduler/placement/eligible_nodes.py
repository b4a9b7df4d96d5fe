"""Pure. On which nodes a session may open, when a fork may begin, and what a session waits for.

Law: a session opens only where its backend works; a fork only beside its origin, between two of the
origin's actions, when all that was submitted to the origin before it has ended.
"""

from __future__ import annotations

from ...domain.isolation import backend_for
from ...domain.session import SessionSpec
from ...domain.states import SessionState
from ..state.ledger import Ledger, NodeEntry, SessionEntry


def eligible_nodes(ledger: Ledger, spec: SessionSpec) -> list[NodeEntry]:
    """The nodes that have what a session asks for, amounts aside, in order of joining."""
    nodes = ledger.up_nodes()
    if spec.origin:
        origin = ledger.sessions.get(spec.origin)
        nodes = [n for n in nodes if origin is not None and n.node == origin.node]
    return [n for n in nodes
            if n.spec.serves(spec.component) and backend_for(n.spec, spec)]


def may_fork(origin: SessionEntry, fork: int) -> bool:
    """Whether a fork may begin now. Ids grow with each submission of their one client."""
    first = next(iter(origin.waiting), 0)
    return origin.state is SessionState.IDLE and not 0 < first < fork


def session_reason(ledger: Ledger, session: SessionEntry, reserve: int) -> str:
    """What a session that is not placed waits for, in one word: a node, its origin's actions,
    memory, cores that it reserves, or those ahead of it."""
    spec = session.spec
    if not ledger.up_nodes():
        return "AllocationEnds" if ledger.draining else "ReqNodeNotAvail"
    origin = ledger.sessions.get(spec.origin)
    if origin is not None and not may_fork(origin, spec.id):
        return "OriginBusy"
    roomy = [n for n in eligible_nodes(ledger, spec) if spec.mem_mib <= n.room_mib]
    if not roomy:
        return "Memory"
    return "Priority" if any(reserve <= n.cores.free for n in roomy) else "Resources"
