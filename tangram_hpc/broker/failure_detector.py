"""Decides which workers have been silent for too long.

A worker that sends nothing for `SILENCE_S` seconds is taken for lost. A broker that was itself
stopped or suspended has received nothing either, and may not conclude anything from that silence:
the time of its own stalls does not count as a worker's silence (see `protocol/liveness`). The
deadlines of clients, sessions and satellites move by that time, too.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..protocol.liveness import Liveness, Stalls
from .satellites import Satellites

SILENCE_S = 30.0  # a worker that sends nothing for this time is lost
WATCH_S = 2.0  # between two checks for silent workers
_STALLED_S = 2 * WATCH_S  # after a longer time without a check, the broker was not running


class FailureDetector:
    """Watches the broker's workers and the broker's own stalls.

    Args:
        now: the broker's time in epoch ns.
        record_event: journals an event and applies it.
        satellites: gets the length of each stall, since satellites have deadlines of their own.

    Attributes:
        liveness: when each worker was last heard, by the number of its node.
    """

    def __init__(self, now: Callable[[], int], record_event: Callable[[ev.Event], None],
                 satellites: Satellites) -> None:
        self._now, self._record_event, self._satellites = now, record_event, satellites
        self.liveness = Liveness(int(SILENCE_S * 1e9))
        self._stalls = Stalls(now(), _STALLED_S * 1e9)
        self._returned_ns = 0.0  # stalled time that `missed_s` has returned already

    def look(self, now: int) -> None:
        """Notices a stall of the broker; to be called before any deadline is compared with `now`.

        After a stall each deadline moves by its length and a little more, so that messages which
        arrived meanwhile are read first.
        """
        stalled_ns = int(self._stalls.look(now))
        if stalled_ns:
            self.liveness.stalled(now)
            self._satellites.stalled(stalled_ns)
            self._record_event(ev.BrokerStalled(now, stalled_ns + int(WATCH_S * 1e9)))

    def missed_s(self) -> float:
        """Returns for how many seconds the broker did not run since the last call."""
        self.look(self._now())
        missed, self._returned_ns = self._stalls.total - self._returned_ns, self._stalls.total
        return missed / 1e9
