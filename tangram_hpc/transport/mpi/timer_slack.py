"""Shortens the kernel's timer slack for threads that poll MPI.

Linux may end a thread's sleep up to 50 us late (its timer slack), so that it can serve several
timers with one interrupt. A poll loop that sleeps for 50 us would then sleep up to twice as long,
and every message through MPI would wait for the loop.
"""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def shorten_timer_slack() -> None:
    """Lets the calling thread's sleeps end at most about 1 us late.

    Without `prctl` (another system than Linux) it does nothing.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    except AttributeError:
        pass
