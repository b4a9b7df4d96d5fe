"""Defines what a rank and its gateway send to each other, and how a side that must poll waits.
Pure.

One message is a tag and bytes. DATA is a part of the byte stream between the rank's client and the
broker; the stream is kept in order, and the gateway does not read it. OPEN carries the number of
the connection, and the gateway echoes it. Messages that reach the rank before that echo belong to
an older connection.

A rank that hears nothing for `DOUBT_S` sends nothing more, and after `GATEWAY_SILENCE_S` it counts
its gateway as dead. MPI itself reports no death, and to send to a dead process can hang or crash.
So both sides say BEAT, from the meeting of the ranks until the rank leaves: while a client is open,
its pings are the rank's beats.
"""

from __future__ import annotations

# both ways
OPEN = 1  # rank: begin connection N (u32); gateway: it has begun, and what follows belongs to it
DATA = 2  # bytes of the connection
BEAT = 5  # the sender lives
# rank -> gateway
CLOSE = 3  # the connection ends
LEAVE = 4  # the rank's program ends: b"" in order, b"!" with an error
# gateway -> rank
BROKER_CLOSED = 6  # the broker's side of the connection ended; the bytes are the reason
PART = 7  # all ranks end in order: finalise MPI
END = 8  # some rank cannot end in order: end without finalising MPI

BEAT_S = 0.5
DOUBT_S = 1.5
GATEWAY_SILENCE_S = 5.0  # how long a rank waits for a message of its gateway
RANK_SILENCE_S = 15.0  # how long a gateway waits for a message of a rank; a client pings every 2 s
STOPPED_S = 30.0  # a gateway that is stopped for so long is continued
PIECE = 1 << 20  # bytes in one DATA, at most
WINDOW = 8 << 20  # bytes on their way to one peer, at most; the rest waits in the sender

_SHARE = 16  # sleep for 1/16 of the quiet time, so that what comes is seen at most 6 % later


class PollBackoff:
    """Says when to poll again: at once at first, later after a fraction of the time that was quiet.

    Args:
        spin_ns: how long to poll without a pause after something moved.
        floor_s: the shortest pause.
    """

    __slots__ = ("_floor_s", "_moved_at", "_spin_ns")

    def __init__(self, spin_ns: int, floor_s: float = 20e-6) -> None:
        self._spin_ns, self._floor_s, self._moved_at = spin_ns, floor_s, 0

    def moved(self, now_ns: int) -> None:
        """Notes that something was sent or received."""
        self._moved_at = now_ns

    def pause_s(self, now_ns: int, most_s: float) -> float:
        """Returns how many seconds to sleep now, at most `most_s`; 0 to poll again at once."""
        quiet = now_ns - self._moved_at
        if quiet < self._spin_ns:
            return 0.0
        return min(most_s, max(self._floor_s, quiet / _SHARE / 1e9))
