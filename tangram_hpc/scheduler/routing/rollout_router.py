"""Chooses the rollout instance that serves a request's next turn. Pure.

Decoding takes longer for every request that shares an instance, and a request's KV cache lies on
one instance: moving it, or computing it again, takes time. The router weighs both. Inside the
wanted bucket, the instance with the least expected time wins (of equal instances, the least loaded
one). Instances of larger degrees count as inside while they idle or hold the request's KV cache. If
a bucket is full, the nearest other buckets follow, larger degrees first.

Invariants: every request is placed exactly once or waits in one queue, in order of arrival. An
instance holds at most `running_max + queue_max` requests. A request's KV cache stays where the
request last ran, and the choice counts the time of moving it. All times are whole nanoseconds; ties
are broken by id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import InfeasibleRequest, InvalidInput

STAY, TRANSFER, PREFILL = "stay", "transfer", "prefill"
ANY = 1 << 60  # as `KvCost.crowded`: no instance is ever overloaded


@dataclass(frozen=True)
class RolloutInstance:
    """A rollout service of one degree.

    A decode step of n requests takes `step_ns + n * request_ns`.

    Attributes:
        id: number of the instance.
        bucket: the bucket that it belongs to, from 0.
        degree: how many GPUs it runs on.
        node: name of the node of its KV cache; empty if not known.
        running_max: how many requests it runs at once.
        queue_max: how many more requests may wait for it.
        context_max: tokens of the longest context that fits.
        step_ns: time of a decode step without requests, in ns.
        request_ns: time that each request adds to a decode step, in ns.
        prefill_ns: time to compute the KV cache of one token again, in ns.
    """

    id: int
    bucket: int
    degree: int
    node: str
    running_max: int
    queue_max: int
    context_max: int
    step_ns: int
    request_ns: int
    prefill_ns: int


@dataclass(frozen=True)
class KvCost:
    """The costs of moving a request's KV cache, and the thresholds of load.

    The load of an instance is by how much its requests lengthen its decode step, in 1/1000 of the
    step without requests. An idle instance of a larger degree takes requests of smaller buckets. An
    overloaded instance takes more requests only if all instances are overloaded.

    Attributes:
        base_ns: fixed time of a move, in ns.
        near_ns: time for each token within a node, in ns. 40K tokens take 0.33 s by default.
        far_ns: time for each token between two nodes, in ns. 40K tokens take 0.73 s by default.
        worth: a request moves to another bucket only if `worth` times the time of the move is at
            most the time in which its remaining tokens are generated.
        idle: the load below which an instance is idle, in 1/1000.
        crowded: the load above which an instance is overloaded, in 1/1000.
    """

    base_ns: int = 10_000_000
    near_ns: int = 8_000
    far_ns: int = 18_000
    worth: int = 8
    idle: int = 500
    crowded: int = 2000


class RouteRequest(NamedTuple):
    """The next turn of a request.

    Attributes:
        request: number of the request, which is the number of its trajectory.
        bucket: the bucket that it belongs to.
        context: tokens of its context.
        remaining: tokens that it is estimated to generate until its end.
    """

    request: int
    bucket: int
    context: int
    remaining: int


class Route(NamedTuple):
    """The instance for a request's next turn.

    Attributes:
        request: number of the request.
        instance: number of the instance.
        how: STAY, TRANSFER or PREFILL: the KV cache is there, is moved, or is computed again.
        move_ns: how long that takes, in ns.
    """

    request: int
    instance: int
    how: str
    move_ns: int


def nearness(wanted: int, bucket: int) -> tuple[int, bool]:
    """Returns a key that sorts buckets by distance from the wanted one, larger degrees first."""
    return abs(bucket - wanted), bucket < wanted


class Router:
    """Keeps rollout instances, the requests on them, and the requests that wait.

    There are two ways to use it. `ask`, `left`, `ended` and `add` place at once every request that
    can be placed. A caller that records decisions before they take effect uses `wait`, `next`,
    `place`, `leave`, `forget` and `join` instead: only `place` places a request, and `next` changes
    nothing. A decision costs O(instances).
    """

    def __init__(self, cost: KvCost | None = None) -> None:
        self._cost = cost or KvCost()
        self._instances: dict[int, RolloutInstance] = {}
        self._on: dict[int, dict[int, None]] = {}  # instance -> its requests
        self._at: dict[int, int] = {}  # request -> instance on which it is
        self._kv: dict[int, int] = {}  # request -> instance that has its KV cache
        self._queue: dict[int, RouteRequest] = {}  # requests that wait, in order
        self._nothing_fits = False  # found out: no waiting request can be placed

    # ---- instances ---------------------------------------------------------------------------

    def add(self, instance: RolloutInstance) -> list[Route]:
        """Adds an instance and returns the routes of waiting requests that can now be placed.

        Raises as `join` does.
        """
        self.join(instance)
        return self._advance()

    def join(self, instance: RolloutInstance) -> None:
        """Adds an instance to the router.

        Raises:
            InvalidInput: an instance with this id exists, or the instance could serve no request.
        """
        if instance.id in self._instances:
            raise InvalidInput(f"rollout instance {instance.id} exists already; give each instance "
                               "an id of its own")
        if instance.running_max < 1 or instance.queue_max < 0 or instance.context_max < 1:
            raise InvalidInput(f"rollout instance {instance.id}: running_max and context_max must "
                               "be at least 1, queue_max at least 0")
        self._instances[instance.id] = instance
        self._on[instance.id] = {}
        self._nothing_fits = False

    def remove(self, instance: int) -> list[int]:
        """Removes an instance and returns its requests, which the caller must queue again.

        Their KV caches are lost.
        """
        stranded = list(self._on.pop(instance))
        del self._instances[instance]
        for request in stranded:
            del self._at[request]
        self._kv = {r: i for r, i in self._kv.items() if i != instance}
        self._nothing_fits = False
        return stranded

    def load(self, instance: int) -> int:
        """Returns how many requests run or queue on an instance."""
        return len(self._on[instance])

    def load_of(self, instance: int) -> int:
        """Returns the same as `load`, or -1 if there is no such instance."""
        return len(self._on[instance]) if instance in self._on else -1

    def at(self, request: int) -> int:
        """Returns the instance on which a request is; -1 for none."""
        return self._at.get(request, -1)

    def easy(self, instance: int) -> int:
        """Returns how many requests an instance can run and still count as idle (see `KvCost`)."""
        one = self._instances[instance]
        return min(one.running_max, self._cost.idle * one.step_ns // (1000 * one.request_ns))

    @property
    def instances(self) -> list[RolloutInstance]:
        """All instances, in the order in which they were added."""
        return list(self._instances.values())

    def waits(self, request: int) -> int:
        """Returns how many requests wait before this one; -1 if it does not wait. O(queue)."""
        return list(self._queue).index(request) if request in self._queue else -1

    @property
    def queue(self) -> list[RouteRequest]:
        """The requests that wait, in order of arrival."""
        return list(self._queue.values())

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def pressure(self) -> int:
        """Requests on instances and in the queue, in 1/1000 of the number that may run at once."""
        room = sum(i.running_max for i in self._instances.values())
        return 1000 * (len(self._at) + len(self._queue)) // room if room else 1000

    # ---- requests ----------------------------------------------------------------------------

    def ask(self, ask: RouteRequest) -> Route | None:
        """Places a turn and returns its route, or None if it waits.

        The route of a turn that waits is returned later by `left`, `ended` or `add`.

        Raises:
            InfeasibleRequest: its context fits on no instance.
        """
        if self._instances and not any(ask.context <= i.context_max
                                       for i in self._instances.values()):
            raise InfeasibleRequest(
                f"request {ask.request}: a context of {ask.context} tokens fits on no rollout "
                "instance; serve the model on a larger degree or cut the context")
        self.wait(ask)
        route = None
        for placed in self._advance():
            assert placed.request == ask.request, "another request could have been placed before"
            route = placed
        return route

    def wait(self, ask: RouteRequest) -> None:
        """Adds a turn to the queue. O(instances)."""
        assert ask.request not in self._at, f"request {ask.request} runs already"
        assert ask.request not in self._queue, f"request {ask.request} waits already"
        self._queue[ask.request] = ask
        self._nothing_fits = self._nothing_fits and not any(self._room(i, ask)
                                              for i in self._instances.values())

    def next(self) -> Route | None:
        """Returns the route of the first waiting request that can be placed, without placing it.

        O(requests before it in the queue + instances). That none can be placed is remembered until
        an instance has room again.
        """
        if self._nothing_fits or not self._queue:
            return None
        most = max((i.context_max for i in self._instances.values() if self._free(i)), default=-1)
        for ask in self._queue.values() if most > 0 else ():
            if ask.context <= most:
                return self._choose(ask)
        self._nothing_fits = True
        return None

    def place(self, request: int, instance: int) -> None:
        """Moves a waiting request and its KV cache to an instance."""
        del self._queue[request]
        self._at[request] = self._kv[request] = instance
        self._on[instance][request] = None

    def left(self, request: int) -> list[Route]:
        """Ends a turn and returns the routes of requests that can now be placed.

        Its KV cache stays where it is.
        """
        self.leave(request)
        return self._advance()

    def leave(self, request: int) -> None:
        """Ends a turn that runs or waits; an unknown request is no error."""
        self._queue.pop(request, None)
        at = self._at.pop(request, None)
        if at is not None:
            del self._on[at][request]
            self._nothing_fits = False

    def ended(self, request: int) -> list[Route]:
        """Ends a request and returns the routes of requests that can now be placed.

        Its KV cache is dropped.
        """
        self.forget(request)
        return self._advance()

    def forget(self, request: int) -> None:
        """Ends a request as `leave` does and drops its KV cache."""
        self._kv.pop(request, None)
        self.leave(request)

    def planning_copy(self) -> Router:
        """Returns a router that continues from here on its own."""
        router = Router(self._cost)
        router._instances, router._at = dict(self._instances), dict(self._at)
        router._kv = dict(self._kv)
        router._on = {number: dict(there) for number, there in self._on.items()}
        router._queue = dict(self._queue)
        return router

    def check(self, settled: bool = True) -> None:
        """Asserts the invariants; if `settled`, also that no request waits that could be placed."""
        for id_, there in self._on.items():
            instance = self._instances[id_]
            assert len(there) <= instance.running_max + instance.queue_max, f"{id_}: too many"
            assert all(self._at[r] == id_ for r in there)
        assert len(self._at) == sum(len(there) for there in self._on.values())
        assert not set(self._at) & set(self._queue), "placed and waiting"
        assert all(i in self._instances for i in self._kv.values())
        for ask in self._queue.values() if settled or self._nothing_fits else ():
            assert self._choose(ask) is None, f"request {ask.request} could be placed but waits"

    # ---- the choice --------------------------------------------------------------------------

    def _advance(self) -> list[Route]:
        """Places waiting requests in order; skips a request whose context fits on no instance now.
        """
        placed = []
        while (route := self.next()) is not None:
            self.place(route.request, route.instance)
            placed.append(route)
        return placed

    def _choose(self, ask: RouteRequest) -> Route | None:
        home = self._instances.get(self._kv.get(ask.request, -1))
        for most in (self._cost.crowded, ANY):  # first instances that are not overloaded
            for bucket in self._outwards(ask.bucket):
                there = [i for i in self._instances.values() if self._room(i, ask)
                         and (i.bucket == bucket or self._open_to(i, ask, home))
                         and self._slowdown(i) <= most]
                if there:
                    return self._move_or_stay(ask, home, self._least(there, ask, home))
        return None

    def _least(self, there: list[RolloutInstance], ask: RouteRequest, home: RolloutInstance | None
               ) -> Route:
        """Returns the route with the least expected time; overloaded instances only as a last
        resort.
        """
        best: tuple[tuple[int, int, int, int], Route] | None = None
        for instance in there:
            how, move_ns = self._move(home, instance, ask.context)
            load = len(self._on[instance.id])
            key = (max(0, load + 1 - instance.running_max),
                   move_ns + ask.remaining * self._step(instance),
                   load * 1000 // instance.running_max, instance.id)
            if best is None or key < best[0]:
                best = key, Route(ask.request, instance.id, how, move_ns)
        assert best is not None
        return best[1]

    def _slowdown(self, instance: RolloutInstance) -> int:
        """Returns by how much the requests of an instance lengthen its decode step, in 1/1000."""
        return 1000 * len(self._on[instance.id]) * instance.request_ns // instance.step_ns

    def _open_to(self, instance: RolloutInstance, ask: RouteRequest,
                 home: RolloutInstance | None) -> bool:
        """Returns whether an instance of a larger degree takes a request of a smaller bucket.

        It does if it holds the request's KV cache or is idle.
        """
        return instance.bucket > ask.bucket and (
            instance is home or self._slowdown(instance) < self._cost.idle)

    def _move_or_stay(self, ask: RouteRequest, home: RolloutInstance | None, route: Route) -> Route:
        """Returns this route, or one that stays if moving costs too much for the remaining tokens.
        """
        target = self._instances[route.instance]
        if (home is None or home.bucket == target.bucket or not self._room(home, ask)
                or len(self._on[home.id]) >= home.running_max
                or self._cost.worth * route.move_ns <= ask.remaining * self._step(target)):
            return route
        return Route(ask.request, home.id, STAY, 0)

    def _outwards(self, bucket: int) -> list[int]:
        """Returns all buckets by distance, larger degrees first."""
        there = sorted({i.bucket for i in self._instances.values()})
        return sorted(there, key=lambda b: nearness(bucket, b))

    def _room(self, instance: RolloutInstance, ask: RouteRequest) -> bool:
        return ask.context <= instance.context_max and self._free(instance)

    def _free(self, instance: RolloutInstance) -> bool:
        return len(self._on[instance.id]) < instance.running_max + instance.queue_max

    def _step(self, instance: RolloutInstance) -> int:
        """Returns the time of a decode step with one more request than now, in ns."""
        return instance.step_ns + instance.request_ns * (len(self._on[instance.id]) + 1)

    def _move(self, home: RolloutInstance | None, to: RolloutInstance,
              context: int) -> tuple[str, int]:
        """Returns the cheapest way to get a context to an instance, and its time in ns."""
        again = context * to.prefill_ns
        if home is None:
            return PREFILL, again
        if home.id == to.id:
            return STAY, 0
        token_ns = self._cost.near_ns if home.node == to.node else self._cost.far_ns
        moved = self._cost.base_ns + context * token_ns
        return (TRANSFER, moved) if moved < again else (PREFILL, again)
