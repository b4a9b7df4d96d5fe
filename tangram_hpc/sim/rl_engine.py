"""One rollout instance on paper: continuous batching by the planner's own cost model.

Law: a step decodes one token of each running request and takes `RolloutCost.step_s` of what runs
and of what lies in the cache; reading a context stops the steps for `prefill_s`. A turn starts when
its whole length fits into the cache, first come first. Progress is whole parts of a token; between
two changes of who runs the rate is the mean one, which is exact while nobody comes or goes.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from ..core.planner.rollout_cost import RolloutCost

_PART = 1 << 20  # of a token
_SECOND = 10**9


@dataclass(frozen=True)
class Work:
    """A turn to decode: its request, the context before it, how many tokens it generates, and how
    many of the context must be read first."""

    request: int
    context: int
    tokens: int
    read: int


class Engine:
    """An instance of one degree."""

    def __init__(self, cost: RolloutCost, degree: int, max_batch: int) -> None:
        self._cost, self.degree, self._max = cost, degree, max_batch
        self.room = cost.kv_tokens(degree)
        self._line: deque[Work] = deque()
        self._ends: list[tuple[int, int]] = []  # (progress at the end, request)
        self._work: dict[int, Work] = {}
        self._gone: set[tuple[int, int]] = set()
        self._at = self._progress = self._stalled = 0
        self._sum = self._reserved = 0  # of the ends; of the cache
        self._step_ns = 0  # mean until the next end
        self.busy_ns = 0
        self.version = 0

    @property
    def load(self) -> int:
        """Requests that run or queue."""
        return len(self._work) + len(self._line)

    @property
    def running(self) -> int:
        """Requests that decode."""
        return len(self._work)

    @property
    def reserved(self) -> int:
        """Tokens of the cache that those will have at the end of their turns."""
        return self._reserved

    def add(self, now: int, work: Work) -> None:
        """One more turn."""
        self._advance(now)
        self._line.append(work)
        self._admit(now)

    def due(self) -> int | None:
        """When the next turn ends if nothing changes, or None."""
        while self._ends and self._ends[0] in self._gone:
            self._gone.discard(heapq.heappop(self._ends))
        if not self._ends:
            return None
        parts = max(0, self._ends[0][0] - self._progress)
        return max(self._at, self._stalled) + -(-parts * self._step_ns // _PART)

    def finish(self, now: int) -> int:
        """The turn that ends now; its request."""
        self._advance(now)
        end, request = heapq.heappop(self._ends)
        self._progress = max(self._progress, end)
        self._leave(request, end)
        self._admit(now)
        return request

    def remove(self, now: int, request: int) -> int:
        """Takes a turn off; how many of its tokens are left."""
        self._advance(now)
        for i, work in enumerate(self._line):
            if work.request == request:
                del self._line[i]
                self._admit(now)
                return work.tokens
        end = next(e for e, r in self._ends if r == request and (e, r) not in self._gone)
        self._gone.add((end, request))
        left = min(self._work[request].tokens, max(1, -(-(end - self._progress) // _PART)))
        self._leave(request, end)
        self._admit(now)
        return left

    def pause(self, now: int, ns: int) -> None:
        """Nothing is decoded for so long from now on, or from the end of what it is reading."""
        self._advance(now)
        self._stalled = max(now, self._stalled) + ns
        self.version += 1

    def _leave(self, request: int, end: int) -> None:
        work = self._work.pop(request)
        self._reserved -= work.context + work.tokens
        self._sum -= end

    def _admit(self, now: int) -> None:
        while self._line and len(self._work) < self._max:
            work = self._line[0]
            if self._work and self._reserved + work.context + work.tokens > self.room:
                break
            self._line.popleft()
            self._work[work.request] = work
            self._reserved += work.context + work.tokens
            end = self._progress + work.tokens * _PART
            self._sum += end
            heapq.heappush(self._ends, (end, work.request))
            start = max(now, self._stalled)
            busy = round(_SECOND * self._cost.prefill_s(
                self.degree, work.read, work.read * (2 * work.context - work.read)))
            self._stalled = start + busy
            self.busy_ns += busy
        self._rate()
        self.version += 1

    def _advance(self, now: int) -> None:
        begin = max(self._at, self._stalled)
        if now > begin and self._work and self._step_ns:
            parts = (now - begin) * _PART // self._step_ns
            self._progress += parts
            self.busy_ns += now - begin
        self._at = max(self._at, now)

    def _rate(self) -> None:
        """The mean step until the next end: keys grow by one a request and step."""
        n = len(self._work)
        if not n:
            self._step_ns = 0
            return
        while self._ends[0] in self._gone:
            self._gone.discard(heapq.heappop(self._ends))
        # what is in the cache now: contexts, and what each has generated in its turn
        keys = self._reserved - (self._sum - n * self._progress) // _PART
        ahead = max(0, self._ends[0][0] - self._progress) // _PART
        self._step_ns = max(1, round(_SECOND * self._cost.step_s(
            self.degree, n, keys + n * ahead // 2)))
