"""Which of the waiting programs go to the broker, and when.

More programs than the cores can run must wait, and a program that waits too long is answered with
504 and sent again by its client. If all of them waited at the broker, each would cost it a
submission, a place in the queue and a cancellation, and those that got cores would be the ones that
have nearly no time left: the cores would be busy with answers that nobody waits for any more, and
the rate of right answers would fall far below what the cores can do (measured at twice the
capacity: from 54 a second to 19; decision 0109).

So programs wait here, where waiting costs nothing, and few are at the broker at once.
`AdmissionWindow` finds out how many: it grows while programs get cores at once and shrinks when
they wait for cores, as a TCP sender finds its rate (slow start, then increase and decrease:
Jacobson, Congestion avoidance and control, 1988, sections 1 and 2). The program whose time ends
first goes first, and one that can probably not end in time is refused at once, so that its client
can try again earlier.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from .. import Future

FIRST = 64.0  # programs at once before anything is known
LEAST = 8.0  # so many are at the broker even when other work of the job has all cores
TARGET_S = 0.5  # a longer wait for cores says that too many programs are at the broker
SHRINK, GROW = 0.7, 0.1  # the factor of a cut; what an end adds to the window after the first cut
MEAN, DEVIATION = 0.125, 0.25  # weights of a new duration, as in TCP's estimate of a round trip


class TooLate(Exception):
    """A program has less time left than programs take."""


class AdmissionWindow:
    """How many programs may be at the broker at once.

    Attributes:
        limit: the number, as a fraction that grows by parts of one.
    """

    def __init__(self) -> None:
        self.limit = FIRST
        self._cut_once = False
        self._ends_to_wait = 0  # ends of programs that were submitted before the last cut

    def ended(self, queue_s: float, full: bool) -> None:
        """Notes that a program has ended.

        Args:
            queue_s: how long it had waited for cores.
            full: whether as many programs were at the broker as may be.
        """
        self._ends_to_wait = max(0, self._ends_to_wait - 1)
        if queue_s > TARGET_S:
            if not self._ends_to_wait:
                self._ends_to_wait = int(self.limit)
                self.limit, self._cut_once = max(LEAST, self.limit * SHRINK), True
        elif full:
            self.limit += GROW if self._cut_once else 1.0


class Durations:
    """How long programs take from the moment they are admitted: a mean and a mean deviation."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0
        self._known = False

    def add(self, seconds: float) -> None:
        """Notes the duration of a program."""
        if not self._known:
            self._mean_s, self._deviation_s, self._known = seconds, seconds / 2, True
            return
        off = seconds - self._mean_s
        self._mean_s += MEAN * off
        self._deviation_s += DEVIATION * (abs(off) - self._deviation_s)

    def most_s(self) -> float:
        """Returns a time within which most programs end; 0 while nothing is known."""
        return self._mean_s + 4 * self._deviation_s


@dataclass
class AdmittedProgram:
    """A program that has its turn: it may be at the broker, and holds one place of the window.

    Attributes:
        queue_s: the longest time that one of its actions has waited for cores.
        ended: whether it has ended by itself, so that its duration counts.
    """

    queue_s: float = 0.0
    ended: bool = False

    def note(self, future: Future) -> None:
        """Notes how long an action that has ended had waited for cores."""
        if future.details is not None:
            self.queue_s = max(self.queue_s, future.details.queue_s)


class ProgramQueue:
    """Programs that wait for their turn, and programs that have it. It belongs to one event loop.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.window, self._now = AdmissionWindow(), now
        self._durations = Durations()
        self._inside = 0
        self._numbers = itertools.count()
        # (due, order of arrival, longest_s, its turn) by due; a program that was cancelled stays
        # here until its turn would come
        self._waiting: list[tuple[float, int, float, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def admitted(self, due: float, longest_s: float) -> AsyncIterator[AdmittedProgram]:
        """Waits until a program may go to the broker, and makes room for another one at the end.

        Args:
            due: when the program must have ended, by the same clock.
            longest_s: how long the program may take at most; so much time is always enough.

        Raises:
            TooLate: the program has less time left than programs take.
        """
        await self._enter(due, longest_s)
        program, began = AdmittedProgram(), self._now()
        try:
            yield program
            program.ended = True
        finally:
            full = self._inside >= int(self.window.limit)
            self._inside -= 1
            took_s = self._now() - began
            if program.ended:
                self._durations.add(took_s)
                self.window.ended(program.queue_s, full)
            elif self._now() >= due:  # it has waited for cores until its time was over
                self.window.ended(took_s, full)
            self._admit()

    async def _enter(self, due: float, longest_s: float) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (due, next(self._numbers), longest_s, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled() and admitted.done() and admitted.exception() is None:
                self._inside -= 1  # cancelled in the moment in which its turn came
                self._admit()
            raise

    def _admit(self) -> None:
        """Gives turns, the earliest end first. It costs O(log n) for each program that leaves."""
        now = self._now()
        while self._waiting and self._inside < int(self.window.limit):
            due, _, longest_s, admitted = heapq.heappop(self._waiting)
            if admitted.done():
                continue
            if due - now < min(longest_s, self._durations.most_s()):
                admitted.set_exception(TooLate())
            else:
                self._inside += 1
                admitted.set_result(None)
