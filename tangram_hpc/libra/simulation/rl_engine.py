"""A simulated rollout instance: continuous batching over a KV cache that may be too small.

A step decodes one token of each running turn. `RolloutCost.step_s` gives its time from the number
of running turns and the tokens in the cache. Reading a context stops the steps for `prefill_s`.
Turns are admitted first come, first served, as soon as their current context and one block fit; the
contexts of all running turns grow. When the cache is full, the turn that was admitted last goes
back to the head of the queue, so the oldest turn is never preempted and each turn becomes the
oldest in time. Keys of turns that do not run stay in the free part of the cache and are evicted
least recently used first, their last tokens before their first ones; what was evicted is read
again. This is how vLLM V1 behaves: preemption by recomputation and automatic prefix caching. An
engine does not know which trajectories have ended.

Progress is counted in whole parts of a token. While the set of running turns does not change, the
mean rate of that interval is used, which gives the exact end of the interval.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

from ..planner.rollout_cost import RolloutCost

BLOCK = 16  # tokens of a cache block
_PART = 1 << 20  # how many parts a token has
_SECOND = 10**9


@dataclass
class DecodeWork:
    """A turn to decode.

    Attributes:
        request: The trajectory's number.
        context: Tokens of context before the turn.
        tokens: Tokens to generate.
        brought: Tokens of the context whose keys are moved with the turn; the other tokens are
            read, unless they are cached.
        start: The engine's progress when the turn was admitted, in parts of a token.
    """

    request: int
    context: int
    tokens: int
    brought: int = 0
    start: int = 0


class SimulatedEngine:
    """A rollout instance of one degree."""

    def __init__(self, cost: RolloutCost, degree: int, max_batch: int) -> None:
        self._cost, self.degree, self._max = cost, degree, max_batch
        self.room = cost.kv_tokens(degree)
        self._line: deque[DecodeWork] = deque()
        self._runs: dict[int, DecodeWork] = {}  # running turns by request, in order of admission
        self._ends: list[tuple[int, int]] = []  # heap of (progress at end, request)
        self._kept: OrderedDict[int, int] = OrderedDict()  # request -> tokens, LRU first
        self._kept_sum = 0
        self._at = self._progress = self._stalled = 0
        self._base = 0  # sum of (context - progress at admission), in parts of a token
        self._step_ns = 0  # mean time of a step until the next change
        self.busy_ns = 0
        self.read = self.preempted = 0  # tokens read, turns preempted
        self.version = 0

    @property
    def load(self) -> int:
        """Number of turns that run or wait."""
        return len(self._runs) + len(self._line)

    @property
    def running(self) -> int:
        """Number of turns that decode."""
        return len(self._runs)

    @property
    def held(self) -> int:
        """Tokens in the cache that running turns need."""
        return (self._base + len(self._runs) * self._progress) // _PART

    @property
    def cached(self) -> int:
        """Tokens in the cache of turns that do not run."""
        return self._kept_sum

    def kept(self, request: int) -> int:
        """Cached tokens of one request that does not run."""
        return self._kept.get(request, 0)

    def add(self, now: int, work: DecodeWork) -> None:
        """Takes one more turn."""
        assert work.tokens > 0 and work.context + work.tokens <= self.room, "it fits nowhere"
        self._advance(now)
        self._line.append(work)
        self._admit(now)

    def due(self) -> int | None:
        """The time at which the next turn ends or is preempted, in ns; None if no turn runs."""
        if not self._runs:
            return None
        parts = self._next() - self._progress
        return max(self._at, self._stalled) + -(-parts * self._step_ns // _PART)

    def finish(self, now: int) -> int | None:
        """Applies the change that is due; returns the request that ended, None for a preemption."""
        self._advance(now)
        self._progress = max(self._progress, self._next())
        end, request = self._ends[0]
        ended = end <= self._progress
        if ended:
            heapq.heappop(self._ends)
        else:
            request = next(reversed(self._runs))
            self.preempted += 1
        work = self._leave(request)
        if not ended:
            self._line.appendleft(work)
        self._admit(now)
        return request if ended else None

    def remove(self, now: int, request: int) -> int:
        """Takes a turn off the engine; returns how many of its tokens are not generated yet."""
        self._advance(now)
        if request in self._runs:
            work = self._leave(request)
        else:
            work = next(w for w in self._line if w.request == request)
            self._line.remove(work)
        self._admit(now)
        return work.tokens

    def pause(self, now: int, ns: int) -> None:
        """Stops decoding for `ns` from now on; while a context is being read, from the end of the
        reading.
        """
        self._advance(now)
        self._stalled = max(now, self._stalled) + ns
        self.version += 1

    def _leave(self, request: int) -> DecodeWork:
        """Stops a running turn and returns it with its present progress; its keys stay in the
        cache.
        """
        work = self._runs.pop(request)
        self._base -= work.context * _PART - work.start
        done = min((self._progress - work.start) // _PART, work.tokens)
        work.context, work.tokens, work.brought = work.context + done, work.tokens - done, 0
        self._kept[request] = work.context
        self._kept_sum += work.context
        self._make_room()
        return work

    def _admit(self, now: int) -> None:
        while self._line and len(self._runs) < self._max:
            work = self._line[0]
            if self._runs and self.held + work.context + BLOCK > self.room:
                break
            self._line.popleft()
            here = self._kept.pop(work.request, 0)
            self._kept_sum -= here
            work.start = self._progress
            self._runs[work.request] = work
            self._base += work.context * _PART - work.start
            heapq.heappush(self._ends, (work.start + work.tokens * _PART, work.request))
            self._read(now, work, work.context - max(here, work.brought))
            self._make_room()
        self._rate()
        self.version += 1

    def _read(self, now: int, work: DecodeWork, tokens: int) -> None:
        """Reads the last `tokens` tokens of a turn's context before anything else is decoded."""
        self.read += tokens
        busy = round(_SECOND * self._cost.prefill_s(
            self.degree, tokens, tokens * (2 * work.context - tokens)))
        self._stalled = max(now, self._stalled) + busy
        self.busy_ns += busy

    def _make_room(self) -> None:
        """Evicts cached keys until the running turns fit."""
        over = self.held + self._kept_sum - self.room
        while over > 0 and self._kept:
            oldest, tokens = next(iter(self._kept.items()))
            gone = min(over, tokens)
            over, self._kept_sum = over - gone, self._kept_sum - gone
            if gone < tokens:
                self._kept[oldest] = tokens - gone
            else:
                del self._kept[oldest]

    def _next(self) -> int:
        """The progress at which the next turn ends or the cache is full."""
        while True:
            end, request = self._ends[0]
            work = self._runs.get(request)
            if work is not None and end == work.start + work.tokens * _PART:
                break
            heapq.heappop(self._ends)  # the entry of a turn that was preempted or removed
        if len(self._runs) == 1:
            return end
        return min(end, max(self._progress, (self.room * _PART - self._base) // len(self._runs)))

    def _advance(self, now: int) -> None:
        begin = max(self._at, self._stalled)
        if now > begin and self._runs:
            self._progress += (now - begin) * _PART // self._step_ns
            self.busy_ns += now - begin
            self._make_room()
        self._at = max(self._at, now)

    def _rate(self) -> None:
        """Sets the mean step time until the next change; keys grow by a token per turn and step."""
        n = len(self._runs)
        if n:
            ahead = (self._next() - self._progress) // _PART
            self._step_ns = max(1, round(_SECOND * self._cost.step_s(
                self.degree, n, self.held + n * ahead // 2)))
