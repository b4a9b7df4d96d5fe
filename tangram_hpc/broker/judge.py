"""Who has been silent for too long, by a broker that knows when it did not run itself.

See `protocol/liveness.py` for why: a stall of the judge counts against nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..protocol.liveness import Liveness, Stalls
from .satellites import Satellites

SILENCE_S = 30.0  # a worker that says nothing for so long is lost
WATCH_S = 2.0  # between two looks at who is silent
_STALLED_S = 2 * WATCH_S  # the broker did not look for longer: it was not running


class Judge:
    """The liveness of a broker's workers, and the broker's own stalls.

    Args:
        now: the broker's time in ns.
        happen: takes a fact.
        satellites: those that end are waited for by a clock as well.
    """

    def __init__(self, now: Callable[[], int], happen: Callable[[ev.Event], None],
                 satellites: Satellites) -> None:
        self._now, self._happen, self._satellites = now, happen, satellites
        self.liveness = Liveness(int(SILENCE_S * 1e9))
        self._stalls = Stalls(now(), _STALLED_S * 1e9)
        self._made_up = 0.0  # stalled ns that `missed_s` has returned already

    def look(self, now: int) -> None:
        """To be called before anything is judged by the clock, with the present time. After a stall
        each deadline moves by it, and a little more, so that what has arrived meanwhile is read
        first."""
        stalled_ns = int(self._stalls.look(now))
        if stalled_ns:
            self.liveness.stalled(now)
            self._satellites.stalled(stalled_ns)
            self._happen(ev.BrokerStalled(now, stalled_ns + int(WATCH_S * 1e9)))

    def missed_s(self) -> float:
        """For how long the broker did not run since this was last asked."""
        self.look(self._now())
        missed, self._made_up = self._stalls.total - self._made_up, self._stalls.total
        return missed / 1e9
