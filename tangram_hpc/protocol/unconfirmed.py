"""Messages of a client that are sent exactly once, although its connection may break. Pure.

Most of what a client sends is known from its state, and may arrive twice: after a reconnect it asks
again for its sessions, and submits its open actions under the same ids. The messages here are in no
state, have no answer, and some would do harm twice, as input for a terminal does. Both sides count
them. The client keeps each one until it knows that the broker has it. Ping carries how many the
client has sent, and Pong brings that number back. After a reconnect `Welcome.received` says how
many the broker has; the client sends the others again, in their order.

A broker that starts anew counts from 0, and cannot know what the broker before it has received:
`Welcome.received` is then -1. The client sends again what it keeps, except what does harm twice:
bytes for a terminal and signals. So what was typed in the moment of the broker's death may be lost.

A client that is closed while its connection is broken does not wait for another one: the messages
that the broker does not have are then never sent. The broker ends what is the client's own, as for
a client that is gone. But it does not hear that a session which outlives its client was released,
and holds that session until its `ttl_s` or `idle_s` is over.
"""

from __future__ import annotations

from collections import deque

from .frame import Buffer
from .input_flow import DATA, SIGNAL
from .message import (
    DetachSession,
    EndTrajectory,
    Input,
    Message,
    ReleaseSession,
    RenewSession,
    ReportToolReturn,
    Shutdown,
)

COUNTED = frozenset({DetachSession, EndTrajectory, Input, ReleaseSession, RenewSession,
                     ReportToolReturn, Shutdown})
# after so many messages, or bytes of their payloads, the client asks what the broker has
_ASK_AFTER, _ASK_BYTES = 64, 1 << 16


class UnconfirmedMessages:
    """The messages of one client that its broker may not have. It is not thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Message, Buffer | None]] = deque()
        self._confirmed = 0  # how many were sent before the first one that is kept
        self._since, self._bytes = 0, 0  # messages, and bytes of payloads, since `add` was True

    @property
    def sent(self) -> int:
        """How many messages of these kinds were sent in all: the stamp of a Ping."""
        return self._confirmed + len(self._kept)

    def add(self, message: Message, payload: Buffer | None) -> bool:
        """Keeps a message that is about to be sent; returns whether a Ping shall follow it, so that
        little is kept."""
        self._kept.append((message, payload))
        self._since += 1
        self._bytes += len(payload) if payload is not None else 0
        if self._since < _ASK_AFTER and self._bytes < _ASK_BYTES:
            return False
        self._since = self._bytes = 0
        return True

    def confirm(self, received: int) -> None:
        """Forgets the messages that the broker has received, by the stamp of its Pong."""
        while self._kept and self._confirmed < received:
            self._kept.popleft()
            self._confirmed += 1

    def missing(self, received: int) -> list[tuple[Message, Buffer | None]]:
        """Returns the messages to send on a new connection.

        Args:
            received: what its Welcome says: how many messages this broker has counted; -1 if
                another broker has counted them. This one then counts from 0.
        """
        if received < 0:
            self._kept = deque(kept for kept in self._kept if not _harms_twice(kept[0]))
        self.confirm(received)
        self._confirmed = max(received, 0)  # fewer than before: another broker has begun to count
        return list(self._kept)


def _harms_twice(message: Message) -> bool:
    """Returns whether a message must not arrive twice. The hangup and the size of a terminal may.
    """
    return isinstance(message, Input) and message.kind in (DATA, SIGNAL)
