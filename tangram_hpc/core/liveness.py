"""Pure. Who has been silent for too long; every call takes `now`.

Law: liveness is decided by what was heard, never by MPI and never by Slurm's exit codes.
"""

from __future__ import annotations


class Liveness:
    """Peers and when each was last heard; O(1) to hear, O(peers) to ask."""

    def __init__(self, silence_ns: int) -> None:
        self._silence_ns = silence_ns
        self._heard: dict[int, int] = {}

    def hear(self, peer: int, now: int) -> None:
        """Something came from this peer."""
        self._heard[peer] = now

    def forget(self, peer: int) -> None:
        """The peer left in an orderly way, or its loss is known."""
        self._heard.pop(peer, None)

    def silent(self, now: int) -> list[int]:
        """The peers that said nothing for longer than is allowed."""
        return [p for p, at in self._heard.items() if now - at > self._silence_ns]
