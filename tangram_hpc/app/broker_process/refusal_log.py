"""One line in the broker's log for each peer that it refused: who, and why.

A site or a user finds there which peers tried to connect without a key, with an old one, or as
something that their key does not allow. A peer that can reach the broker's port can be refused as
often as it likes, so the lines are rationed: after `_MOST` of them the rest of a minute is only
counted, and the number is in the first line of a later minute. A log that cannot be written, on a
full disk for example, costs the line and nothing else: no peer may end the broker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from ...domain.outcome import TEXT_MAX

_MOST, _WITHIN_S = 20, 60.0


class RefusalLog:
    """Writes the lines.

    Args:
        now_s: returns the time of the monotonic clock, in seconds.
        out: where the lines go; None for stderr.
    """

    def __init__(self, now_s: Callable[[], float], out: TextIO | None = None) -> None:
        self._now_s, self._out = now_s, out
        self._since = now_s()
        self._written = self._left_out = 0

    def __call__(self, peer: str, why: str) -> None:
        """Notes a peer that was refused.

        Args:
            peer: where it is: an address, or a process and its user.
            why: the reason. It may hold what the peer sent, so it is escaped and cut.
        """
        now = self._now_s()
        if now - self._since >= _WITHIN_S:
            self._since, self._written = now, 0
        if self._written >= _MOST:
            self._left_out += 1
            return
        self._written += 1
        also = f" (and {self._left_out} more before, not listed)" if self._left_out else ""
        self._left_out = 0
        told = ascii(why)[1:-1][:TEXT_MAX]
        with suppress(OSError, ValueError):
            print(f"tangram: broker: refused {peer or 'a peer'}: {told}{also}",
                  file=self._out or sys.stderr, flush=True)
