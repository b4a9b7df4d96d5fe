"""Short sleeps that are short: Linux rounds a thread's sleeps up by its timer slack, 50 us."""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def sharpen() -> None:
    """Lets this thread's sleeps end within about a microsecond; harmless where not supported."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    except AttributeError:
        pass  # no prctl here
