"""Connections of the swarm: messages pass through real frames and arrive one by one, in order.

What is on its way when a connection breaks arrives in part: a prefix, as with TCP. The two
directions end independently, so one side may know of the end long before the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.frame import Buffer, Inbox, Outbox

if TYPE_CHECKING:
    from swarm.world import Process, World

Receive = Callable[[Any, "memoryview | None"], None]
# What may arrive twice, one behind the other, without harm: the protocol sends it again itself.
TWICE = (ms.Submit, ms.Cancel, ms.Ack, ms.AttemptsStarted, ms.SandboxUp, ms.Released,
         ms.StartAttempt, ms.KillAttempt, ms.CloseSandbox, ms.Confirmed, ms.ActionResult,
         ms.SessionUp, ms.SessionDown, ms.Granted, ms.GrantEnded)


class Lane:
    """One direction of a connection.

    Attributes:
        items: what is on its way: messages with payloads, and at the end the reason of the end.
        closed: whether nothing can be put in any more.
        deaf: whether the receiver has left.
    """

    def __init__(self, to: Process) -> None:
        self.to = to
        self.items: deque[tuple[Any, Any]] = deque()
        self.closed = self.deaf = False
        self.receive: Receive = lambda message, payload: None
        self.lost: Callable[[str], None] = lambda reason: None

    def put(self, message: Any, payload: memoryview | None) -> None:
        if not self.closed:
            self.items.append((message, payload))

    def end(self, reason: str) -> None:
        if not self.closed:
            self.items.append((None, reason))
            self.closed = True

    def deliver(self) -> None:
        """Lets the receiver have the next message, or the end."""
        message, payload = self.items.popleft()
        if self.deaf or not self.to.alive:
            self.items.clear()
        elif message is None:
            self.deaf = True
            self.lost(payload)
        else:
            self.receive(message, payload)


class End:
    """One side of a connection, as a driver sees it (`ports.Link`)."""

    unsent = 0

    def __init__(self, wire: Wire, out: Lane, back: Lane) -> None:
        self._wire, self._out, self._back, self._outbox = wire, out, back, Outbox()

    def send(self, message: Any, payload: Buffer | None = None) -> None:
        self._outbox.put(message, payload)

    def flush(self) -> None:
        self.carry(self._outbox.take())

    def carry(self, frame: list[Buffer]) -> None:
        """Sends one frame."""
        for message, payload in Inbox().feed(b"".join(frame)):
            self._out.put(message, payload)
            if isinstance(message, TWICE) and self._wire.world.strikes("duplicate"):
                self._out.put(message, payload)

    def discard(self) -> None:
        self._outbox.take()

    def close(self) -> None:
        """Ends it behind what was flushed; what was only queued is dropped, as `SocketLink` does.
        """
        self._out.end("closed")
        self._back.deaf = True


class Wire:
    """A connection of a peer with a broker.

    Attributes:
        up, down: the lanes to the broker and to the peer.
        held_until: it carries nothing before (world's ns).
    """

    def __init__(self, world: World, peer: Process, broker: Process) -> None:
        self.world, self.peer, self.broker = world, peer, broker
        self.up, self.down = Lane(broker), Lane(peer)
        self.at_broker = End(self, self.down, self.up)
        self.at_peer = End(self, self.up, self.down)
        self.held_until = 0

    @property
    def over(self) -> bool:
        """Whether nothing will ever arrive on it again."""
        up, down = self.up, self.down
        return (((up.closed and not up.items) or not up.to.alive)
                and ((down.closed and not down.items) or not down.to.alive))

    def cut(self, reason: str, only: Lane | None = None) -> None:
        """Breaks it: of what is on its way a random prefix arrives."""
        for lane in (self.up, self.down):
            if only in (None, lane) and not lane.closed:
                for _ in range(self.world.rng.randrange(len(lane.items) + 1)):
                    lane.items.pop()
                lane.end(reason)
