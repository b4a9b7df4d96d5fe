"""The simulated rollout stage: batches of trajectories on engines, routed by the real router.

Invariants: every turn is routed by the router and decoded by the engine that it names. The
bucketing learns a tool's result when the tool returns, and a trajectory's length when it ends. A
turn that loses its engine is routed again, and its context is read anew. Batches may mix: the
caller decides which trajectory starts when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...scheduler.routing.cmlfq import Cmlfq, TreeLimits
from ...scheduler.routing.rollout_router import (
    PREFILL,
    TRANSFER,
    KvCost,
    RolloutInstance,
    Route,
    Router,
    RouteRequest,
)
from ..planner.rollout_cost import RolloutCost
from .rl_engine import DecodeWork, SimulatedEngine
from .rl_lengths import TrajectoryLengths
from .rl_routing import Bucketing

After = Callable[[int, Callable[[int], None]], None]  # (time in ns, function): calls it then


@dataclass(frozen=True)
class EnginePlan:
    """An engine to be opened.

    Attributes:
        degree: Number of its GPUs.
        bucket: The bucket that it serves.
        node: Number of its node.
        meant: The number of requests that the plan gives it.
    """

    degree: int
    bucket: int
    node: int
    meant: int


@dataclass
class _Live:
    """A trajectory that has not ended.

    Attributes:
        one: Its turns and tool calls.
        batch: Its batch.
        turn: Index of its current turn.
        done: Tokens generated so far.
        context: Tokens in the cache when the previous turn ended.
        unread: Tokens that must still be read.
        left: Tokens of this turn that are not generated.
        asked: How often it was routed; an arrival with an older count is ignored.
        bucket: Its current bucket.
        engine: Its engine; -1 for none.
    """

    one: TrajectoryLengths
    batch: int
    turn: int = 0
    done: int = 0
    context: int = 0
    unread: int = 0
    left: int = 0
    asked: int = 0
    bucket: int = 0
    engine: int = -1


@dataclass
class Totals:
    """Counters of a run; the counters of an engine are added when it closes."""

    moved: int = 0  # tokens of context that went to another engine
    generated: int = 0
    ended: int = 0
    read: int = 0  # tokens that engines read
    given: int = 0  # those of them that no engine had read before
    preempted: int = 0  # turns that were preempted
    busy_ns: int = 0  # GPU time in which engines decoded or read

    @property
    def again(self) -> int:
        """Tokens of context that were read again."""
        return self.read - self.given


class SimulatedRollouts:
    """Engines, router and trajectories.

    Args:
        cost: Times of the engines.
        kv: Costs of moving keys.
        shape: Limits of C-MLFQ's tree.
        bucketing: Chooses buckets.
        after: Sets an alarm.
        ended: Called with the time and the batch when a trajectory ends.
    """

    def __init__(self, cost: RolloutCost, kv: KvCost, shape: TreeLimits, bucketing: Bucketing,
                 after: After, ended: Callable[[int, int], None]) -> None:
        self._cost, self._shape, self._after, self._ended = cost, shape, after, ended
        self.bucketing = bucketing
        self.router = Router(kv)
        self._engines: dict[int, SimulatedEngine] = {}
        self._place: dict[int, EnginePlan] = {}
        self._live: dict[int, _Live] = {}
        self._next_engine = self._next_request = 0
        self.mean_context = 1  # mean tokens in the cache, from trajectories that have ended
        self.totals = Totals()

    @property
    def under_way(self) -> int:
        """Number of trajectories that have not ended."""
        return len(self._live)

    @property
    def places(self) -> int:
        """How many trajectories all engines can decode at once, estimated from the mean context."""
        return sum(min(self._cost.rollout.max_batch, i.context_max // self.mean_context)
                   for i in self.router.instances)

    def place(self, engine: int) -> EnginePlan:
        """Returns the layout (`EnginePlan`) of an open engine, by its id."""
        return self._place[engine]

    def check(self) -> None:
        """Asserts the router's invariants, and that each placed turn is on its engine or on its way
        there.
        """
        self.router.check()
        assert sum(e.load for e in self._engines.values()) == sum(
            live.engine >= 0 for live in self._live.values())

    # ---- engines -----------------------------------------------------------------------------

    def open(self, now: int, place: EnginePlan) -> int:
        """Opens one more engine; returns its id."""
        engine = SimulatedEngine(self._cost, place.degree, self._cost.rollout.max_batch)
        self._next_engine += 1
        id_ = self._next_engine
        self._engines[id_], self._place[id_] = engine, place
        most = max(1, min(self._cost.rollout.max_batch, engine.room // self.mean_context))
        step = self._cost.step_s(place.degree, 1, 0)
        each = self._cost.step_s(place.degree, 2, 2 * self.mean_context) - step
        routes = self.router.add(RolloutInstance(
            id_, place.bucket, place.degree, f"n{place.node}", most, 0,
            engine.room, round(step * 1e9), max(1, round(each / 2 * 1e9)),
            max(1, round(float(self._cost.prefill_s(place.degree, 1, 0)) * 1e9))))
        self._go(now, routes)
        return id_

    def close(self, now: int, engines: Sequence[int]) -> None:
        """Closes engines. Their turns go to other engines, or wait until one has room."""
        stranded: list[int] = []
        for engine in engines:
            one = self._engines.pop(engine)
            del self._place[engine]
            for request in self.router.remove(engine):
                live = self._live[request]
                if live.engine == engine:  # otherwise its keys are still on their way
                    left = one.remove(now, request)
                    live.done += live.left - left
                    live.context += live.left - left + live.unread
                    live.left, live.unread, live.engine = left, 0, -1
                stranded.append(request)
            self._count(one)
        for request in stranded:
            self._ask(now, request)

    def _count(self, engine: SimulatedEngine) -> None:
        self.totals.busy_ns += engine.busy_ns * engine.degree
        self.totals.read += engine.read
        self.totals.preempted += engine.preempted

    def pause(self, now: int, ns: int) -> None:
        """Stops all engines for `ns`, as when they take new weights."""
        for id_, engine in self._engines.items():
            engine.pause(now, ns)
            self._alarm(id_)

    # ---- trajectories ------------------------------------------------------------------------

    def start(self, now: int, batch: int, trajectories: Sequence[TrajectoryLengths]) -> None:
        """Starts these trajectories of a batch."""
        begun = []
        for one in trajectories:
            self._next_request += 1
            request = self._next_request
            live = self._live[request] = _Live(one, batch)
            live.bucket = self.bucketing.started(request, one.prompt)
            live.unread = one.prompt_tokens
            live.left = one.turns[0].generated if one.turns else one.last
            begun.append(request)
        for request in begun:
            self._ask(now, request)

    def _ask(self, now: int, request: int) -> None:
        live = self._live[request]
        live.asked += 1
        ask = RouteRequest(request, live.bucket, live.context + live.unread + live.left,
                           self._believed(request))
        route = self.router.ask(ask)
        if route is not None:
            self._go(now, [route])

    def _believed(self, request: int) -> int:
        estimate = self.bucketing.estimate(request) if isinstance(self.bucketing, Cmlfq) else None
        return max(self._live[request].left, estimate.mean if estimate else 0)

    def _go(self, now: int, routes: Sequence[Route]) -> None:
        for route in routes:
            live = self._live[route.request]
            if route.how == PREFILL:
                live.unread += live.context
                live.context = 0
            if route.how == TRANSFER or (route.how == PREFILL and live.done):
                self.totals.moved += live.context + live.unread
            if route.how == TRANSFER:
                self._after(now + route.move_ns, partial(self._arrive, route, live.asked))
            else:
                self._arrive(route, live.asked, now)

    def _arrive(self, route: Route, mark: int, now: int) -> None:
        live = self._live.get(route.request)
        if live is None or live.asked != mark:
            return  # the turn's engine was closed meanwhile
        live.engine = route.instance
        engine = self._engines[route.instance]
        brought = live.context if route.how == TRANSFER else 0
        engine.add(now, DecodeWork(route.request, live.context + live.unread, live.left, brought))
        self._alarm(route.instance)

    def _alarm(self, id_: int) -> None:
        engine = self._engines.get(id_)  # the last end of a batch may have closed this engine
        due, version = (engine.due(), engine.version) if engine is not None else (None, 0)
        if due is not None:
            self._after(due, lambda at: self._turn_ends(at, id_, version))

    def _turn_ends(self, now: int, id_: int, version: int) -> None:
        engine = self._engines.get(id_)
        if engine is None or engine.version != version:
            return
        request = engine.finish(now)
        if request is None:  # a turn was preempted
            self._alarm(id_)
            return
        live = self._live[request]
        live.context += live.unread + live.left
        live.done += live.left
        live.unread, live.left, live.engine = 0, 0, -1
        if live.turn < len(live.one.turns):
            turn = live.one.turns[live.turn]
            self._after(now + turn.tool_ns, lambda at: self._tool_returns(at, request))
            self._go(now, self.router.left(request))
        else:
            self._finish(now, request, live)
        self._alarm(id_)

    def _finish(self, now: int, request: int, live: _Live) -> None:
        del self._live[request]
        self.bucketing.ended(request, live.one.generated, live.batch)
        self.totals.ended += 1
        self.totals.generated += live.one.generated
        self.totals.given += live.one.read
        self._go(now, self.router.ended(request))
        self._ended(now, live.batch)

    def _tool_returns(self, now: int, request: int) -> None:
        live = self._live[request]
        turn = live.one.turns[live.turn]
        live.turn += 1
        live.unread = turn.tokens
        turns = live.one.turns
        live.left = turns[live.turn].generated if live.turn < len(turns) else live.one.last
        live.bucket = self.bucketing.returned(
            request, self._shape.signal(turn.tool, turn.chars, turn.status), live.done)
        self._ask(now, request)
