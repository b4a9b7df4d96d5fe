"""Sessions that several clients use: attaching, detaching, and who is told of a session's life.

Whether a client may attach is decided by `scheduler/policy/sharing.py`; this part of the driver
turns the messages into events and answers them. It also keeps, in memory alone, what the opener of
a shared session tells clients that attach (`payload.SessionContext`), and passes that on unread. To
a broker that is started again, the opener tells it again. It remembers in the same way why the last
sessions have ended, for clients whose connection was broken at that moment.

Invariant: a token is neither recorded nor written into any text.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..domain.decision import AnnounceSessionEnd
from ..domain.ids import client_of, show
from ..protocol import message as ms
from ..protocol.frame import Buffer
from ..scheduler.policy.sharing import attach_decision, may_close, may_use
from ..scheduler.state.ledger import Attachment, Ledger, SessionEntry

_ENDS_MAX = 4096  # of so many sessions the broker remembers why they have ended


class AttachedSessions:
    """The broker's side of shared sessions.

    Args:
        ledger: the scheduler's state.
        now: the broker's time in epoch ns.
        record_event: journals an event and applies it.
        send_to_client: queues a message to a client.
    """

    def __init__(self, ledger: Ledger, now: Callable[[], int],
                 record_event: Callable[[ev.Event], None],
                 send_to_client: Callable[..., None]) -> None:
        self._ledger, self._now = ledger, now
        self._record_event, self._send_to_client = record_event, send_to_client
        self._contexts: dict[int, Buffer] = {}  # by session: what attached clients are told
        # by session: why the last ones have ended, and which clients were told, as others must not
        self._ends: dict[int, tuple[ms.SessionDown, tuple[int, ...]]] = {}

    def opened(self, session: int, context: Buffer | None) -> None:
        """Keeps what clients that attach to a new session are told."""
        if context is not None:
            self._contexts[session] = bytes(context)

    def attach(self, client: int, asked: ms.AttachSession) -> None:
        """Attaches a client to a session, or tells it in one line why that cannot be."""
        decision = attach_decision(self._ledger, asked.name, asked.token, asked.hold)
        session = decision.session
        if asked.session and (session is None or session.spec.id != asked.session):
            return self.send_ended(client, asked.session)
        if session is None:
            return self._send_to_client(client, ms.Rejected(asked.request, decision.why,
                                                            decision.ended))
        number = session.spec.id
        wanted = Attachment(decision.may_close, asked.hold)
        before = session.attached.get(client)
        if before is not None:  # what it may do only grows until it detaches
            wanted = Attachment(before.may_close or wanted.may_close, before.hold or wanted.hold)
        if client_of(number) != client and wanted != before:
            self._record_event(ev.SessionAttached(self._now(), number, client, *wanted))
        context = self._contexts.get(number)
        self._send_to_client(client, ms.Attached(
            asked.request, session.spec.shown(), may_close(client, session),
            0 if context is None else 1), context)
        self.send_up(session, client)

    def detach(self, client: int, session: int) -> None:
        """Detaches a client; nothing happens if it is not attached."""
        entry = self._ledger.sessions.get(session)
        if entry is not None and client in entry.attached:
            self._record_event(ev.SessionDetached(self._now(), session, client))

    def close(self, client: int, session: int) -> None:
        """Closes a session for a client that may do that; nothing happens for any other client."""
        entry = self._ledger.sessions.get(session)
        if entry is None or not may_close(client, entry):
            return
        who = self._ledger.clients[client]
        why = "" if client_of(session) == client else f"closed by client {client} ({who.name})"
        self._record_event(ev.SessionClosing(self._now(), session, why))

    def renew(self, client: int, session: int) -> None:
        """Restarts the idle time of a session for a client that may use it."""
        entry = self._ledger.sessions.get(session)
        if entry is not None and may_use(client, entry):
            self._record_event(ev.SessionRenewed(self._now(), session))

    def send_up(self, session: SessionEntry, client: int = 0) -> None:
        """Tells the clients of a session, or one of them, on which node it is open.

        Args:
            session: the session; nothing is sent if it is not open.
            client: number of the client; 0 for its own client and all that are attached.
        """
        if not session.ready:
            return
        number, node = session.spec.id, self._ledger.nodes[session.node].spec.name
        message = ms.SessionUp(number, node, session.placed_at - session.requested_at,
                               session.image)
        for each in (client,) if client else (client_of(number), *session.attached):
            self._send_to_client(each, message)

    def send_down(self, end: AnnounceSessionEnd) -> None:
        """Tells the clients of a session that it has ended."""
        self._contexts.pop(end.session, None)
        message = ms.SessionDown(end.session, end.reason, end.infeasible)
        told = (client_of(end.session), *end.attached)
        for client in told:
            self._send_to_client(client, message)
        self._ends[end.session] = message, told
        if len(self._ends) > _ENDS_MAX:
            del self._ends[next(iter(self._ends))]

    def send_ended(self, client: int, session: int) -> None:
        """Tells a client that asks for a session after a reconnect that it has ended, and why if
        the session was the client's, or it was attached.
        """
        message, told = self._ends.get(session, (None, ()))
        if message is None or client not in told:
            unknown = f"session {show(session)} ended while its client was away"
            message = ms.SessionDown(session, unknown)
        self._send_to_client(client, message)
