"""Threads that take turns: the client's own thread runs only when the world lets it.

A client's connection has a background thread that blocks in `Channel.wait`, in `time.sleep` and in
`Event.wait`. Here that thread is a greenlet: each of these calls parks it and gives the turn back
to the world, which resumes it when its wait is over by the world's clock. So exactly one of them
runs at any time, and a seed always gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet


class StrandKilled(BaseException):
    """Raised in a parked thread whose process was killed."""


class Strand(greenlet):
    """One thread that takes turns with the world.

    Attributes:
        until: when its wait is over at the latest (world's ns).
    """

    def __init__(self, now: Callable[[], int], target: Callable[[], Any]) -> None:
        super().__init__(target)
        self._now = now
        self._met: Callable[[], bool] = lambda: True
        self.until, self._killed, self._begun = 0, False, False

    @property
    def done(self) -> bool:
        """Whether it has returned."""
        return self._begun and self.dead

    def ready(self) -> bool:
        """Whether it can go on."""
        return (self._now() >= self.until or self._met()) and not self.done

    def go_on(self) -> None:
        """Lets it run until it parks or ends; raises what ends it."""
        self._begun = True
        self.parent = getcurrent()
        self.switch()

    def kill(self) -> None:
        """Ends it where it is parked."""
        self._killed = True
        if not self._begun:
            return
        try:
            while not self.dead:  # a thread that cleans up may park again
                self.go_on()
        except StrandKilled:
            pass

    def park(self, met: Callable[[], bool], timeout_s: float) -> bool:
        """Gives the turn back until a condition is met or the time is over; called by the thread
        itself. Returns whether the condition is met.
        """
        if not self._killed:
            self._met, self.until = met, self._now() + int(timeout_s * 1e9)
            assert self.parent is not None
            self.parent.switch()
        if self._killed:
            raise StrandKilled
        return met()


def parked(met: Callable[[], bool], timeout_s: float) -> bool:
    """Parks the thread that calls; see `Strand.park`."""
    own = getcurrent()
    assert isinstance(own, Strand), "only a client's own thread may wait"
    return own.park(met, timeout_s)


class StrandEvent:
    """What a client's connection takes for `threading.Event`."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def wait(self, timeout_s: float) -> bool:
        return parked(lambda: self._set, timeout_s)
