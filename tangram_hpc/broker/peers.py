"""Holds the peers that are connected to the broker, and the messages that wait to be sent to them.

Messages are sent in batches, not when they are made. Messages to workers leave at the end of the
scheduling cycle, when the journal's file has their events, so that all orders of a cycle to one
worker share a frame. Messages to clients leave when the journal is as safe as its mode promises: no
client may learn of an event that a crash can undo.

Messages to one peer keep their order. A client that has no room on its connection gets its messages
later, from the client outbox. A message to a peer that is not connected is dropped: results are
kept in the outbox until the client acknowledges them, and a lost worker's leases are fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..ports import Link
from ..protocol import message as ms
from ..protocol.frame import Buffer
from .client_outbox import LINK_MAX, ClientOutbox, SendQueue

_CONFIRM_AFTER = 256  # confirmations to a worker that no longer wait for another message to it
ToClient = tuple[int, ms.Message, Buffer | None]  # the client's number, a message, its payload


@dataclass(slots=True)
class Peer:
    """One connection, and the client or worker at its other end.

    Attributes:
        link: the connection.
        role: what the peer may be, by the key that it has proven: `auth.CLIENT` or `auth.WORKER`;
            empty on a link without keys, which lies inside of one process.
        note_refusal: called with the reason when the broker ends the connection because of what the
            peer said.
        client: number of the client; 0 until it has said hello, and for workers.
        node: number of the worker's node; 0 until it has said hello, and for clients.
        leaving: the reason that a worker gave for ending soon; empty while it stays.
        gone: whether the connection has ended.
        said_bye: whether the client announced that it disconnects for good.
        keeps: whether the worker keeps results for a broker that is started again.
        confirmed: leases whose results the worker need not keep any longer, and is not told so yet.
        queue: messages that wait for room on the link; only clients have any.
    """

    link: Link
    role: str = ""
    note_refusal: Callable[[str], None] = lambda why: None
    client: int = 0
    node: int = 0
    leaving: str = ""
    gone: bool = False
    said_bye: bool = False
    keeps: bool = False
    confirmed: list[int] = field(default_factory=list)
    queue: SendQueue = field(default_factory=SendQueue)


class Peers:
    """All connected clients and workers, with the messages that will be sent to them next.

    Attributes:
        clients: connected clients by their number. The driver adds and removes them.
        workers: connected workers by the number of their node. The driver adds and removes them.
        counted: how many counted messages (`protocol/unconfirmed.py`) have come from each client
            that has not expired. The driver sets and removes it.
    """

    def __init__(self, outbox: ClientOutbox) -> None:
        self.clients: dict[int, Peer] = {}
        self.workers: dict[int, Peer] = {}
        self.counted: dict[int, int] = {}
        self._outbox = outbox
        self._to_clients: list[ToClient] = []  # since the last `flush_workers`
        # workers with queued messages, by the `id` of their links
        self._unflushed: dict[int, Peer] = {}

    def everyone(self) -> list[Peer]:
        """Returns all connected peers."""
        return [*self.workers.values(), *self.clients.values()]

    def count(self, peer: Peer) -> bool:
        """Counts a message of a client, for its next Welcome. Returns False if the client has
        another connection by now, on which it has sent the message again."""
        if self.clients.get(peer.client) is not peer:
            return False
        self.counted[peer.client] = self.counted.get(peer.client, 0) + 1
        return True

    def shut_down(self, reason: str, discard: bool = False) -> None:
        """Tells every peer that the broker ends, and why.

        Args:
            reason: the reason.
            discard: whether messages that were queued for it are dropped.
        """
        for peer in self.everyone():
            if discard:
                peer.link.discard()
            peer.link.send(ms.Shutdown(reason))
            peer.link.flush()

    def send_to_worker(self, node: int, message: ms.Message, payload: Buffer | None = None
                       ) -> None:
        """Queues a message to the worker of a node until `flush_workers`."""
        peer = self.workers.get(node)
        if peer is not None:
            peer.link.send(message, payload)
            self._unflushed[id(peer.link)] = peer

    def confirm(self, node: int, lease: int) -> None:
        """Tells the worker of a node, with the next messages to it, that it need not keep the
        result of a lease.
        """
        peer = self.workers.get(node)
        if peer is not None and peer.keeps:
            peer.confirmed.append(lease)
            if len(peer.confirmed) >= _CONFIRM_AFTER:
                self._unflushed[id(peer.link)] = peer

    def confirm_all(self) -> bool:
        """Lets all confirmations leave with the next `flush_workers`; returns whether there are
        any.
        """
        for peer in self.workers.values():
            if peer.confirmed:
                self._unflushed[id(peer.link)] = peer
        return bool(self._unflushed)

    def send_to_client(self, client: int, message: ms.Message, payload: Buffer | None = None
                       ) -> None:
        """Queues a message to a client until `deliver`."""
        self._to_clients.append((client, message, payload))

    def take_messages(self) -> list[ToClient]:
        """Returns the messages to clients, which must be delivered after the journal's commit."""
        messages, self._to_clients = self._to_clients, []
        return messages

    def flush_workers(self) -> None:
        """Sends all messages to workers. The journal has their events by then, so that a broker
        which is started again knows every order that a worker may have.
        """
        unflushed, self._unflushed = self._unflushed, {}
        for peer in unflushed.values():
            if peer.confirmed:
                peer.link.send(ms.Confirmed(tuple(peer.confirmed)), None)
                peer.confirmed.clear()
            peer.link.flush()

    def deliver(self, messages: list[ToClient]) -> None:
        """Hands messages to the clients' connections, as far as these have room."""
        unflushed: dict[int, Link] = {}
        for client, message, payload in messages:
            peer = self.clients.get(client)
            if peer is not None:
                link = peer.link
                if payload is None or peer.queue.words or link.unsent > LINK_MAX:
                    self._outbox.send(client, link, peer.queue, message, payload)
                else:
                    link.send(message, payload)
                unflushed[client] = link
        for link in unflushed.values():
            link.flush()
