"""Keeps results and messages that wait for clients, in memory up to a bound for each client.

A client may stop reading: its program hangs, is stopped, or is slower than its actions. Results of
its actions go on arriving at the broker. Two bounds keep them from filling the broker's memory, and
no other client is slowed down:

- Results that are not acknowledged yet are kept, since the client may reconnect and need them
  again. Beyond `KEPT_MAX` bytes their payloads go to the client's spill file and are read back
  when they are sent.
- Messages for which the client's connection has no room (more than `LINK_MAX` bytes are unsent)
  wait in a queue, in order. A result waits there without its payload, which is kept with the
  unacknowledged results. Other payloads (chunks of streamed output) have a bound of their own;
  beyond it they go to the spill file, too.

Invariants: no message is lost, and none overtakes another: a client that reads again gets
everything in order. Without a spill file (a simulation), or when its disk is full, payloads stay in
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..domain.ids import client_of
from ..ports import Link, SpillFiles
from ..protocol import message as ms
from ..protocol.frame import Buffer

KEPT_MAX = 16 << 20  # bytes in memory: payloads of a client's results, and of its queue
LINK_MAX = 4 << 20  # with more unsent bytes on a connection, messages wait in the queue


class SpillLocation(NamedTuple):
    """The position of a payload in its client's spill file, in bytes."""

    offset: int
    size: int


QueuedPayload = Buffer | SpillLocation | None


@dataclass(slots=True)
class SendQueue:
    """The messages that wait for room on one connection.

    Attributes:
        words: messages with their payloads, in order; a result's payload is looked up when it is
            sent.
        held: bytes of their payloads that are in memory.
    """

    words: deque[tuple[ms.Message, QueuedPayload]] = field(default_factory=deque)
    held: int = 0


@dataclass(slots=True)
class _Kept:
    """One client's results that are not acknowledged.

    Attributes:
        results: by action id, each with its payload or the payload's place.
        held: bytes of their payloads that are in memory.
    """

    results: dict[int, tuple[ms.ActionResult, QueuedPayload]] = field(default_factory=dict)
    held: int = 0


class ClientOutbox:
    """All clients' unacknowledged results and waiting messages.

    Args:
        spill: files for payloads beyond the bounds; None: all payloads stay in memory.
    """

    def __init__(self, spill: SpillFiles | None) -> None:
        self._spill = spill
        self._kept: dict[int, _Kept] = {}  # by client; only clients with unacknowledged results

    # ---- results until they are acknowledged ---------------------------------------------------

    def keep(self, result: ms.ActionResult, payload: Buffer | None) -> None:
        """Keeps a result until its client acknowledges it."""
        client = client_of(result.action)
        kept = self._kept.get(client)
        if kept is None:
            kept = self._kept[client] = _Kept()
        place: QueuedPayload = payload
        if payload is not None:
            held = kept.held + len(payload)
            if held > KEPT_MAX and type(place := self._spilled(client, payload)) is SpillLocation:
                held = kept.held
            kept.held = held
        kept.results[result.action] = result, place

    def acknowledged(self, client: int, actions: Iterable[int]) -> None:
        """Forgets results that the client has received. Actions must be this client's; unknown ones
        are ignored.
        """
        kept = self._kept.get(client)
        if kept is None:
            return
        for action in actions:
            _, place = kept.results.pop(action, (None, None))
            if type(place) is SpillLocation:
                self._free(client)
            elif place is not None:
                kept.held -= len(place)
        if not kept.results:
            del self._kept[client]

    def expired(self, client: int) -> None:
        """Forgets everything that is kept for a client that will not come back."""
        self._kept.pop(client, None)
        if self._spill is not None:
            self._spill.drop(client)

    def of(self, client: int) -> list[ms.ActionResult]:
        """Returns a client's results, to be sent again on a new connection."""
        kept = self._kept.get(client)
        return [result for result, _ in kept.results.values()] if kept is not None else []

    def unread(self) -> dict[str, int]:
        """Returns the number of unacknowledged results of each client that has payloads in its
        spill file; shown by `tangram info --json`."""
        return {str(client): len(kept.results) for client, kept in self._kept.items()
                if any(isinstance(place, SpillLocation) for _, place in kept.results.values())}

    # ---- messages on their way -----------------------------------------------------------------

    def send(self, client: int, link: Link, queue: SendQueue, message: ms.Message,
             payload: Buffer | None) -> None:
        """Sends a message, or queues it until the connection has room. A result that is sent again
        comes without its payload, which is kept here."""
        again = payload is None and type(message) is ms.ActionResult and message.n > 0
        if queue.words or link.unsent > LINK_MAX:
            self._queue(client, queue, message, payload)
        elif not again:
            link.send(message, payload)
        elif (found := self.payload(message.action)) is not None:  # type: ignore[attr-defined]
            link.send(message, found)
            link.flush()  # many such messages may come; a flush shows whether there is room

    def _queue(self, client: int, queue: SendQueue, message: ms.Message, payload: Buffer | None
               ) -> None:
        place: QueuedPayload = payload
        if payload is not None and not self._is_kept(message):
            if queue.held + len(payload) > KEPT_MAX:
                place = self._spilled(client, payload)
            if not isinstance(place, SpillLocation):
                queue.held += len(payload)
        elif payload is not None:
            place = None  # the payload is kept with the result and looked up there
        queue.words.append((message, place))

    def pump(self, client: int, link: Link, queue: SendQueue) -> None:
        """Sends queued messages as far as the connection has room now."""
        while queue.words and link.unsent <= LINK_MAX:
            message, place = queue.words.popleft()
            if type(message) is ms.ActionResult and message.n and place is None:
                found = self.payload(message.action)
                if found is None:
                    continue  # the result was acknowledged on an earlier connection
                link.send(message, found)
            elif isinstance(place, SpillLocation):
                link.send(message, self._read(client, place))
                self._free(client)
            else:
                if place is not None:
                    queue.held -= len(place)
                link.send(message, place)
            link.flush()

    def close(self, client: int, queue: SendQueue) -> None:
        """Forgets the queue of a connection that has ended; the client's results are kept."""
        for _, place in self._drained(queue):
            if isinstance(place, SpillLocation):
                self._free(client)

    def payload(self, action: int) -> Buffer | None:
        """Returns the payload of a result that is kept."""
        client = client_of(action)
        kept = self._kept.get(client)
        found = kept.results.get(action) if kept is not None else None
        if found is None:
            return None
        return self._read(client, found[1]) if isinstance(found[1], SpillLocation) else found[1]

    def _is_kept(self, message: ms.Message) -> bool:
        if type(message) is not ms.ActionResult:
            return False
        kept = self._kept.get(client_of(message.action))
        return kept is not None and message.action in kept.results

    @staticmethod
    def _drained(queue: SendQueue) -> Iterator[tuple[ms.Message, QueuedPayload]]:
        queue.held = 0
        while queue.words:
            yield queue.words.popleft()

    # ---- spill files ---------------------------------------------------------------------------

    def _spilled(self, client: int, payload: Buffer) -> QueuedPayload:
        """Writes a payload to the client's spill file; returns the payload itself where that is not
        possible."""
        offset = self._spill.put(client, payload) if self._spill is not None else -1
        return SpillLocation(offset, len(payload)) if offset >= 0 else payload

    def _read(self, client: int, place: SpillLocation) -> bytes:
        assert self._spill is not None
        return self._spill.get(client, place.offset, place.size)

    def _free(self, client: int) -> None:
        assert self._spill is not None
        self._spill.free(client)
