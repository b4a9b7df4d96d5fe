"""Passes port streams between clients and workers (`protocol/port_flow.py`).

A client may open a stream to a session that it may use, whether it opened the session or is
attached to it. Streams are not journaled: no decision depends on them, and a broker that restarts
knows none. A stream on which a side sends more than it has credit for is ended, so no client can
fill a worker's connection. A stream also ends when its client or its worker loses the connection,
and when its client detaches from the session.
"""

from __future__ import annotations

from typing import NamedTuple

from ..domain.ids import client_of, show
from ..protocol import message as ms
from ..protocol.frame import Buffer
from ..protocol.input_flow import InputWindow
from ..protocol.port_flow import PIECE_MAX, STREAMS_MAX, WINDOW
from ..scheduler.policy.sharing import may_use
from ..scheduler.state.ledger import Ledger
from .peers import Peers


class _Route(NamedTuple):
    session: int
    node: int


class PortRelay:
    """The port streams of one broker."""

    def __init__(self, ledger: Ledger, peers: Peers) -> None:
        self._ledger, self._peers = ledger, peers
        self._routes: dict[int, _Route] = {}  # by stream
        self._counts: dict[int, int] = {}  # by session: how many streams it has
        self._window = InputWindow(WINDOW, PIECE_MAX)  # from clients to sandboxes
        self._back = InputWindow(WINDOW, PIECE_MAX)  # from sandboxes to clients

    def from_client(self, client: int, message: ms.StreamMessage, payload: Buffer | None) -> None:
        """Handles a client's message. A message for a stream that has ended is dropped silently,
        because its client may not have known of the end."""
        if client_of(message.stream) != client:
            return
        if isinstance(message, ms.OpenStream):
            return self._open(client, message)
        route = self._routes.get(message.stream)
        if route is None:
            return
        if isinstance(message, ms.StreamData) and not self._window.take(
                message.stream, len(payload) if payload is not None else 0):
            return self._end(message.stream, "the client sent more than it had credit for",
                             "EPROTO")
        # bounded, so that a client that grants much and never reads cannot fill the broker
        if isinstance(message, ms.StreamCredit):
            added = self._back.grant(message.stream, message.count)
            message = ms.StreamCredit(message.stream, added)
        self._peers.send_to_worker(route.node, message, payload)
        if isinstance(message, ms.StreamEnded):
            self._forget(message.stream)

    def _open(self, client: int, message: ms.OpenStream) -> None:
        number, entry = message.session, self._ledger.sessions.get(message.session)
        if message.stream in self._routes:
            return
        why = code = ""
        if entry is None or not may_use(client, entry):
            why, code = f"session: {show(number)} is not open to this client", "ENOENT"
        elif not entry.ready:
            why, code = f"session: {show(number)} waits for a place on a node", "EAGAIN"
        elif self._counts.get(number, 0) >= STREAMS_MAX:
            why, code = (f"connect: session {show(number)} has {STREAMS_MAX} streams open, the most"
                         " it may have; close one", "EMFILE")
        if why or entry is None:
            answer = ms.StreamEnded(message.stream, why, code)
            return self._peers.send_to_client(client, answer)
        self._routes[message.stream] = _Route(number, entry.node)
        self._counts[number] = self._counts.get(number, 0) + 1
        self._back.grant(message.stream, WINDOW)
        self._peers.send_to_worker(entry.node, message)

    def from_worker(self, node: int, message: ms.StreamMessage, payload: Buffer | None) -> None:
        """Handles a worker's message about a stream to its node."""
        route = self._routes.get(message.stream)
        if route is None or route.node != node:
            return
        client = client_of(message.stream)
        if isinstance(message, ms.StreamData) and not self._back.take(
                message.stream, len(payload) if payload is not None else 0):
            return self._end(message.stream, "the session's node sent more than it had credit for",
                             "EPROTO")
        if isinstance(message, ms.StreamCredit):
            added = self._window.grant(message.stream, message.count)
            message = ms.StreamCredit(message.stream, added)
        self._peers.send_to_client(client, message, payload)
        if isinstance(message, ms.StreamEnded):
            self._forget(message.stream)

    def client_lost(self, client: int) -> None:
        """Ends the streams of a client whose connection is over."""
        for stream in [one for one in self._routes if client_of(one) == client]:
            self._end(stream, "its client is gone")

    def worker_lost(self, node: int) -> None:
        """Ends the streams to a worker that is gone."""
        for stream in [one for one, route in self._routes.items() if route.node == node]:
            self._end(stream, "the session's node was lost", "ECONNRESET")

    def detached(self, client: int, session: int) -> None:
        """Ends the streams of a client that may no longer use a session."""
        for stream in [one for one, route in self._routes.items()
                       if route.session == session and client_of(one) == client]:
            self._end(stream, "this client detached from the session", "ECONNRESET")

    def _end(self, stream: int, reason: str, code: str = "") -> None:
        """Ends a stream, and tells both sides."""
        ended = ms.StreamEnded(stream, reason, code)
        self._peers.send_to_worker(self._routes[stream].node, ended)
        self._peers.send_to_client(client_of(stream), ended)
        self._forget(stream)

    def _forget(self, stream: int) -> None:
        session = self._routes.pop(stream).session
        self._counts[session] -= 1
        if not self._counts[session]:
            del self._counts[session]
        self._window.forget(stream)
        self._back.forget(stream)
