"""Decides which peers have been silent for too long. Pure: every call takes `now`.

A process that measures the silence of others must first know whether it ran itself. A broker that
was stopped (SIGSTOP, `scontrol suspend`, a machine that froze) finds on waking that all peers have
been silent, although their messages are unread in its sockets. So it measures its own stalls: it
looks at the clock regularly, and a gap between two looks that is much longer than planned is time
in which it did not run and heard nothing. That time does not count as silence of any peer.

Only received messages decide about liveness, never MPI and never Slurm's exit codes.
"""

from __future__ import annotations

PING_S = 2.0  # a peer of the broker that has sent nothing for so long sends a Ping


class Stalls:
    """Measures how long its owner did not run.

    Args:
        now: the time of the first look.
        most: the longest gap between two looks that is no stall, in the unit of `now`.
    """

    __slots__ = ("_looked", "_most", "total")

    def __init__(self, now: float, most: float) -> None:
        self._looked, self._most = now, most
        self.total: float = 0  # the length of all stalls so far, in the unit of `now`

    def look(self, now: float) -> float:
        """Returns the length of the stall that ends with this look; 0 if there was none."""
        gap, self._looked = now - self._looked, now
        if gap <= self._most:
            return 0
        self.total += gap
        return gap


class Patience:
    """A time limit that counts only the time in which the waiting process itself ran.

    Args:
        now: the time of the first look.
        limit: the time limit, in the unit of `now`.
        step: how much of the time between two looks is counted, at most. More was a stall.
    """

    __slots__ = ("_left", "_looked", "_step")

    def __init__(self, now: float, limit: float, step: float) -> None:
        self._looked, self._left, self._step = now, limit, step

    def over(self, now: float) -> bool:
        """Returns whether the limit has been reached. Every call counts as a look."""
        self._left -= min(now - self._looked, self._step)
        self._looked = now
        return self._left <= 0


class Liveness:
    """Remembers when each peer was last heard. Noting one peer takes O(1); listing the silent
    peers takes O(peers).
    """

    def __init__(self, silence_ns: int) -> None:
        self._silence_ns = silence_ns
        self._heard: dict[int, int] = {}

    def hear(self, peer: int, now: int) -> None:
        """Notes that something came from this peer."""
        self._heard[peer] = now

    def forget(self, peer: int) -> None:
        """Removes a peer that left in order, or whose loss is known."""
        self._heard.pop(peer, None)

    def stalled(self, now: int) -> None:
        """Counts all peers as heard at `now`, after the process did not run until then.

        What they sent may not have been read yet, and they may have been stopped together with it.
        """
        self._heard = dict.fromkeys(self._heard, now)

    def silent(self, now: int) -> list[int]:
        """Returns the peers that sent nothing for longer than is allowed."""
        return [p for p, at in self._heard.items() if now - at > self._silence_ns]
