"""Pure. What a rank and its gateway say to each other, and how often a side that must poll looks.

Law: one word is one message: a tag and bytes. DATA is a piece of the byte stream between the rank's
client and the broker, in order, unread. OPEN carries the conversation's number and is echoed;
whatever reaches the rank before that echo belongs to an older conversation. A rank that hears
nothing for `DOUBT_S` sends nothing more, and for `SILENCE_S` takes its gateway for dead: MPI itself
tells nobody of a death, and to send to the dead can hang or crash.
"""

from __future__ import annotations

# both ways
OPEN = 1  # rank: begin conversation N (u32); gateway: begun, what follows belongs to it
DATA = 2  # bytes of the conversation
# rank -> gateway
CLOSE = 3  # the conversation ends
LEAVE = 4  # the rank's program ends: b"" in order, b"!" by an error
# gateway -> rank
BEAT = 5  # the gateway lives
BROKER_CLOSED = 6  # the broker's side of the conversation ended; the bytes are the reason
PART = 7  # all ranks leave in order: finalise MPI
END = 8  # not all can: end without finalising

BEAT_S = 0.5
DOUBT_S = 1.5
SILENCE_S = 5.0  # rank's patience with its gateway
DEAF_S = 15.0  # gateway's patience with a rank (its client pings every 2 s)
PIECE = 1 << 20  # bytes in one DATA at most
WINDOW = 8 << 20  # bytes on their way to one peer at most; the rest waits at home

_SHARE = 16  # sleep a sixteenth of the time that was quiet: at most 6 % later than without


class Pace:
    """When to look again: spin at first, then sleep for a share of the time that was quiet.

    Args:
        spin_ns: how long to spin after something moved.
        floor_s: the shortest sleep.
    """

    __slots__ = ("_floor_s", "_moved_at", "_spin_ns")

    def __init__(self, spin_ns: int, floor_s: float = 20e-6) -> None:
        self._spin_ns, self._floor_s, self._moved_at = spin_ns, floor_s, 0

    def moved(self, now_ns: int) -> None:
        """Something was sent or came."""
        self._moved_at = now_ns

    def pause_s(self, now_ns: int, most_s: float) -> float:
        """Seconds to sleep now; 0 says spin."""
        quiet = now_ns - self._moved_at
        if quiet < self._spin_ns:
            return 0.0
        return min(most_s, max(self._floor_s, quiet / _SHARE / 1e9))
