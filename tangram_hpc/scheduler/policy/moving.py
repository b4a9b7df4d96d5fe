"""Pure. How a session leaves a node that is drained: it moves to another one, or it is closed.

Law: a session has one home. It moves only at rest, when its files are all that it needs
(`SessionSpec.movable`) and a node that could hold it lends for longer than the old one is there.
It leaves its old home whole, files packed and sandbox gone, before it waits for the next one as any
session does, so never two copies of it run. What cannot be packed is lost, with the reason.
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
    """What becomes now of an open session without leases on a drained node; nothing while it is
    being opened, copied from or packed. O(nodes)."""
    if session.state is SessionState.MOVING:
        return []
    reason = f"node {node.spec.name}: {node.draining}"
    if not (session.spec.movable and _taken_elsewhere(ledger, node, session, now)):
        return [ev.SessionClosing(now, session.spec.id, reason)]
    if session.state is not SessionState.IDLE or not session.takes:
        return []  # it will be at rest soon, and moves then
    return [ev.SessionMoving(now, session.spec.id, reason)]


def _taken_elsewhere(ledger: Ledger, old: NodeEntry, session: SessionEntry, now: int) -> bool:
    """Whether another node has what it asks for, now or when others there have ended."""
    spec, until = session.spec, max(now, old.spec.ends_at_ns)
    return any(n.spec.serves(spec.component) and backend_for(n.spec, spec)
               and spec.mem_mib <= n.spec.mem_mib - n.parked_mib
               and len(session.cores) <= len(n.cores.units)
               and (not n.lends_until or n.lends_until > until)
               for n in ledger.up_nodes())
