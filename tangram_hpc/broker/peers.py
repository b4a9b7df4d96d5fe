"""Holds the peers that are connected to the broker, and the messages that wait to be sent to them.

Messages are sent in batches, not when they are made. Messages to workers leave at the end of the
scheduling cycle, so that all orders of a cycle to one worker share a frame. Messages to clients
leave when the journal is as safe as its mode promises: no client may learn of an event that a crash
can undo.

Messages to one peer keep their order. A client that has no room on its connection gets its messages
later, from the client outbox. A message to a peer that is not connected is dropped: results are
kept in the outbox until the client acknowledges them, and a lost worker's leases are fenced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ports import Link
from ..protocol import message as ms
from ..protocol.frame import Buffer
from .client_outbox import LINK_MAX, ClientOutbox, SendQueue

ToClient = tuple[int, ms.Message, Buffer | None]  # the client's number, a message, its payload


@dataclass(slots=True)
class Peer:
    """One connection, and the client or worker at its other end.

    Attributes:
        link: the connection.
        client: number of the client; 0 until it has said hello, and for workers.
        node: number of the worker's node; 0 until it has said hello, and for clients.
        leaving: the reason that a worker gave for ending soon; empty while it stays.
        said_bye: whether the client announced that it disconnects for good.
        queue: messages that wait for room on the link; only clients have any.
    """

    link: Link
    client: int = 0
    node: int = 0
    leaving: str = ""
    said_bye: bool = False
    queue: SendQueue = field(default_factory=SendQueue)


class Peers:
    """All connected clients and workers, with the messages that will be sent to them next.

    Attributes:
        clients: connected clients by their number. The driver adds and removes them.
        workers: connected workers by the number of their node. The driver adds and removes them.
        counted: how many counted messages (`protocol/unconfirmed.py`) have come from each client
            that has not expired. The driver changes it.
    """

    def __init__(self, outbox: ClientOutbox) -> None:
        self.clients: dict[int, Peer] = {}
        self.workers: dict[int, Peer] = {}
        self.counted: dict[int, int] = {}
        self._outbox = outbox
        self._to_clients: list[ToClient] = []  # since the last `end_cycle`
        self._unflushed: dict[int, Link] = {}  # workers' links with queued messages, by `id`

    def everyone(self) -> list[Peer]:
        """Returns all connected peers."""
        return [*self.workers.values(), *self.clients.values()]

    def send_to_worker(self, node: int, message: ms.Message, payload: Buffer | None = None
                       ) -> None:
        """Queues a message to the worker of a node until `end_cycle`."""
        peer = self.workers.get(node)
        if peer is not None:
            peer.link.send(message, payload)
            self._unflushed[id(peer.link)] = peer.link

    def send_to_client(self, client: int, message: ms.Message, payload: Buffer | None = None
                       ) -> None:
        """Queues a message to a client until `deliver`."""
        self._to_clients.append((client, message, payload))

    def end_cycle(self) -> list[ToClient]:
        """Sends all messages to workers; returns the messages to clients, which must be delivered
        after the journal's commit.
        """
        unflushed, self._unflushed = self._unflushed, {}
        for link in unflushed.values():
            link.flush()
        messages, self._to_clients = self._to_clients, []
        return messages

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
