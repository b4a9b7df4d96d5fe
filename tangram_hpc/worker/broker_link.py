"""A worker's sending side of the connection with its broker, which may be lost and come back.

Everything that happens in one turn of the loop leaves as one frame. A busy worker leaves a gap
between two frames, so that frames are few and large. A worker that has nothing to say sends pings.

The connection has three states. Without a link, nothing is sent; the worker reports what the broker
must know when the broker welcomes it again. With a link and no welcome yet, only the hello and
pings are sent. After the welcome (`joined`), everything is sent.

The hello lists the leases that the worker holds. If one is released or returned before the welcome
arrives, the list is wrong by then, so these two reports wait for the welcome (`take_late`).
"""

from __future__ import annotations

from collections.abc import Callable

from ..ports import Link, Timer
from ..protocol.frame import BUSY_MESSAGES
from ..protocol.liveness import PING_S
from ..protocol.message import Message, Ping, Released, Returned


class BrokerLink:
    """Sends a worker's messages over its present connection.

    Args:
        link: the first connection.
        timer: calls back on the loop.
        gap_s: the time between two frames of a busy worker in seconds; 0: no gap.
        prefetched: whether the worker holds prefetched leases, which makes it busy.

    Attributes:
        joined: whether the broker has welcomed this worker over the present connection.
    """

    def __init__(self, link: Link, timer: Timer, gap_s: float,
                 prefetched: Callable[[], bool]) -> None:
        self._link: Link | None = link
        self._timer, self._gap_s, self._prefetched = timer, gap_s, prefetched
        self.joined = False
        self._late: list[Message] = []  # released and returned leases between hello and welcome
        self._said = 0  # messages since the last flush
        self._flushing = False  # whether a flush is scheduled
        self._quiet = True  # nothing was sent since the last ping was due
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a link, with or without a welcome."""
        return self._link is not None

    @property
    def unsent(self) -> int:
        """How many flushed bytes the connection has not taken yet."""
        return 0 if self._link is None else self._link.unsent

    def attach(self, link: Link) -> None:
        """Sends over this link from now on; `joined` is False until the broker's welcome."""
        self._link, self.joined = link, False

    def detach(self) -> None:
        """Notes that the connection is lost; nothing is written to it any more."""
        self._link, self.joined, self._said = None, False, 0
        self._late.clear()

    def mute(self) -> None:
        """Lets no further report through, while the connection stays open."""
        self.joined = False

    def close(self) -> None:
        """Flushes and closes the connection, if there is one, and ends the pings."""
        self._closed = True
        link, self._link = self._link, None
        self.joined = False
        if link is not None:
            link.flush()
            link.close()

    def send(self, message: Message, payload: bytes | None = None) -> None:
        """Sends a report with the next frame, if the broker has welcomed this worker."""
        if self.joined:
            self.put(message, payload)
        elif self._link is not None and isinstance(message, Released | Returned):
            self._late.append(message)

    def put(self, message: Message, payload: bytes | None = None) -> None:
        """Sends a message with the next frame, also before the broker's welcome."""
        if self._link is None:
            return
        self._quiet = False
        self._link.send(message, payload)
        self._said += 1
        if not self._flushing:
            self._flushing = True
            self._timer.after(0, self._flush)

    def take_late(self) -> list[Message]:
        """Returns the reports that waited for the welcome."""
        late, self._late = self._late, []
        return late

    def flush(self) -> None:
        """Sends all that was put as one frame now."""
        if self._link is not None:
            self._link.flush()

    def _flush(self) -> None:
        busy = self._said >= BUSY_MESSAGES or (self._said and self._prefetched())
        self._flushing = bool(busy) and self._gap_s > 0
        self._said = 0
        if self._closed:
            return
        self.flush()
        if self._flushing:
            self._timer.after(self._gap_s, self._flush)

    def start_pings(self) -> None:
        """Sends a Ping whenever nothing was sent for `PING_S`, until the connection is closed."""
        self._timer.after(PING_S, self._ping)

    def _ping(self) -> None:
        if self._closed:
            return
        if self._quiet:
            self.put(Ping())
        self._quiet = True
        self._timer.after(PING_S, self._ping)
