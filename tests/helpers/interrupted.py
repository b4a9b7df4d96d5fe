"""^C, or another signal, at a chosen place of a call: wherever CPython looks for signals.

CPython runs signal handlers when a function of Python begins and when a call of a C function has
returned, among others. A profile function is called at the same places, so an exception that it
raises is that of a ^C which came just then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

PLACES_MAX = 2000


def handled(call: Callable[[], Any], place: int, handler: Callable[[], None]) -> tuple[bool, Any]:
    """Calls a function, and a signal handler in it at the place with this number, from 1.

    Returns:
        Whether the call has so many places, and what the function returned.
    """
    seen, came = -1, False  # the call of `call` itself is not counted

    def look(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen, came
        if event in ("call", "c_return"):
            seen += 1
            if seen == place:
                came = True
                handler()

    sys.setprofile(look)
    try:
        told = call()
    finally:
        sys.setprofile(None)
    return came, told


def interrupted(call: Callable[[], Any], place: int) -> bool:
    """Calls a function and raises KeyboardInterrupt in it at the place with this number, from 1.

    Returns:
        Whether the call has so many places.
    """
    raised = False

    def interrupt() -> None:
        nonlocal raised
        raised = True
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        handled(call, place, interrupt)
    return raised


def places(call: Callable[[], Any]) -> Iterator[int]:
    """Interrupts a function at each place once, and yields the place's number after each."""
    for place in range(1, PLACES_MAX):
        if not interrupted(call, place):
            return
        yield place
    raise AssertionError(f"the call has more than {PLACES_MAX} places")
