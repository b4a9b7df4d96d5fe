"""Pure. Takes a session off a drained node: the session moves to another node, or it is closed.

Invariants: a session has one home node at a time. It moves only while it is idle, only if it can go
on from its files alone (`SessionSpec.movable`), and only if another node that could hold it lends
for longer than the old one exists. Its files are packed and its sandbox is removed before it waits
for the next node like a new session, so it never has two running sandboxes. A session that cannot
be packed is lost, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...domain import event as ev
from ...domain.isolation import backend_for
from ...domain.states import SessionState

if TYPE_CHECKING:
    from ..state.ledger import Ledger, NodeEntry, SessionEntry


def migrate_or_close(ledger: Ledger, node: NodeEntry, session: SessionEntry, now: int
                     ) -> list[ev.Event]:
    """How an open session without leases leaves its drained node now, as events; none while it is
    being opened, packed, or copied for a fork. O(nodes).
    """
    if session.state is SessionState.MOVING:
        return []
    reason = f"node {node.spec.name}: {node.draining}"
    if not (session.spec.movable and _fits_elsewhere(ledger, node, session, now)):
        return [ev.SessionClosing(now, session.spec.id, reason)]
    if session.state is not SessionState.IDLE or not session.takes:
        return []  # the session will be idle soon, and then it moves
    return [ev.SessionMoving(now, session.spec.id, reason)]


def _fits_elsewhere(ledger: Ledger, old: NodeEntry, session: SessionEntry, now: int) -> bool:
    """Whether the session fits on another node, now or once other work there has ended."""
    spec, until = session.spec, max(now, old.spec.ends_at_ns)
    return any(n.spec.serves(spec.component) and backend_for(n.spec, spec)
               and spec.mem_mib <= n.spec.mem_mib - n.parked_mib
               and len(session.cores) <= len(n.cores.units)
               and (not n.lends_until or n.lends_until > until)
               for n in ledger.up_nodes())
