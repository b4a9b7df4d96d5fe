"""Simulated links and timers and a journal in memory: adapters of the drivers' ports.

Every message is really encoded into bytes (`protocol/frame.py`) and decoded at the other end. A
link keeps the order of its messages. The latency of a message is drawn between `latency_ns` and
twice that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from ..domain.event import Event
from ..protocol.frame import Buffer, Inbox, Outbox
from ..protocol.message import AnyMessage, Message
from .event_queue import EventQueue

DELIVERY, FLUSH, CYCLE = 1, 2, 3  # priorities within an instant; ends have priority 0
Receive = Callable[[AnyMessage, memoryview | None], None]


class SimulatedLink:
    """One direction of a connection; implements `ports.Link`.

    Attributes:
        receive: Called with each message that arrives.
        frames, bytes: How many flushes carried data, and how many bytes.
        unsent: Always 0: a simulated link takes everything at once.
    """

    def __init__(self, event_queue: EventQueue, latency_ns: int, rng: random.Random) -> None:
        self._event_queue, self._latency_ns, self._rng = event_queue, latency_ns, rng
        self._outbox, self._inbox = Outbox(), Inbox()
        self._arrives = event_queue.now
        self.receive: Receive = lambda message, payload: None
        self.frames = self.bytes = 0
        self.unsent = 0

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """See `ports.Link`."""
        self._outbox.put(message, payload)

    def flush(self) -> None:
        """See `ports.Link`."""
        data = b"".join(self._outbox.take())
        if not data:
            return
        self.frames, self.bytes = self.frames + 1, self.bytes + len(data)
        late = self._latency_ns and self._rng.randrange(self._latency_ns, 2 * self._latency_ns)
        self._arrives = max(self._arrives, self._event_queue.now + late)
        self._event_queue.put(self._arrives, DELIVERY, lambda: self._deliver(data))

    def discard(self) -> None:
        """See `ports.Link`."""
        self._outbox.take()

    def close(self) -> None:
        """See `ports.Link`."""
        self.discard()

    def cut(self) -> None:
        """Cuts the link: not even messages that are on their way arrive."""
        self.receive = lambda message, payload: None

    def _deliver(self, data: bytes) -> None:
        for message, payload in self._inbox.feed(data):
            self.receive(message, payload)


class SimulatedTimer:
    """Implements `ports.Timer`; calls without delay come later in the same instant, by priority."""

    def __init__(self, event_queue: EventQueue, priority: int) -> None:
        self._event_queue, self._priority = event_queue, priority

    def after(self, delay_s: float, call: Callable[[], None]) -> object:
        """See `ports.Timer`."""
        self._event_queue.put(self._event_queue.now + round(delay_s * 1e9), self._priority, call)
        return None


class MemoryJournal:
    """Implements `ports.Journal` in memory: passes each event on and reports it as safe at once."""

    mode = "none"

    def __init__(self, note: Callable[[Event], None]) -> None:
        self._note, self._count = note, 0

    def append(self, events: Iterable[Event]) -> int:
        """See `ports.Journal`."""
        for event in events:
            self._note(event)
            self._count += 1
        return self._count

    def commit(self, then: Callable[[], None]) -> None:
        """See `ports.Journal`."""
        then()

    def superseded(self) -> bool:
        """See `ports.Journal`."""
        return False

    def close(self) -> None:
        """See `ports.Journal`."""
