"""Pure. Which rollout instance serves a request's next turn.

Law: every request asked for is placed exactly once or waits in one line, in order of arrival; an
instance holds at most `running_max + queue_max` requests; a request's KV stays where it last ran,
and moving it is paid for in the choice. Inside the wanted bucket the least expected time wins (the
least loaded, where instances are alike), and larger degrees count as inside while they idle or hold
the request's KV; a full bucket falls back outwards, larger degrees first. Whole nanoseconds and
tokens; ties by id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import InfeasibleRequest, InvalidInput

STAY, TRANSFER, PREFILL = "stay", "transfer", "prefill"
ANY = 1 << 60  # as `crowded`: none ever is


@dataclass(frozen=True)
class RolloutInstance:
    """A rollout service of one degree. A decode step of n requests takes `step_ns + n *
    request_ns`; `prefill_ns` is a token's, when a context is computed again."""

    id: int
    bucket: int
    degree: int
    node: str
    running_max: int
    queue_max: int
    context_max: int  # tokens of one request that fit at all
    step_ns: int
    request_ns: int
    prefill_ns: int


@dataclass(frozen=True)
class KvCost:
    """What moving a request's KV takes: fixed, and for each token on one node or between two.
    `worth`: a move between buckets must cost less than this part of what is left to decode.
    An instance is idle while its requests lengthen its step by less than `idle`, and crowded from
    `crowded` on (1/1000 of the step of one that has none): a larger degree that idles takes
    requests of smaller buckets, a crowded one takes more only if all are."""

    base_ns: int = 10_000_000
    near_ns: int = 8_000  # 40K tokens: 0.33 s
    far_ns: int = 18_000  # 40K tokens: 0.73 s
    worth: int = 8
    idle: int = 500
    crowded: int = 2000


class RouteRequest(NamedTuple):
    """A request's next turn: its bucket, its context and what is believed to be left (tokens)."""

    request: int
    bucket: int
    context: int
    remaining: int


class Route(NamedTuple):
    """Where a request goes, how its KV gets there, and what that takes."""

    request: int
    instance: int
    how: str
    move_ns: int


def nearness(wanted: int, bucket: int) -> tuple[int, bool]:
    """How far a bucket is from the wanted one, the larger degree first."""
    return abs(bucket - wanted), bucket < wanted


class Router:
    """Rollout instances, who is on them, and who waits. O(instances) a decision.

    `ask`, `left`, `ended` and `add` place whoever can be placed. Who records decisions before they
    count uses `wait`, `next`, `place`, `leave` and `join` in their stead, which decide nothing.
    """

    def __init__(self, cost: KvCost | None = None) -> None:
        self._cost = cost or KvCost()
        self._instances: dict[int, RolloutInstance] = {}
        self._on: dict[int, dict[int, None]] = {}  # instance -> its requests
        self._at: dict[int, int] = {}  # request -> where it runs
        self._kv: dict[int, int] = {}  # request -> where its KV lies
        self._line: dict[int, RouteRequest] = {}  # waits
        self._quiet = False  # nobody can be placed, as was found out already

    # ---- instances ---------------------------------------------------------------------------

    def add(self, instance: RolloutInstance) -> list[Route]:
        """One more serves; who waited may be placed. Raises as `join`."""
        self.join(instance)
        return self._advance()

    def join(self, instance: RolloutInstance) -> None:
        """One more serves.

        Raises:
            InvalidInput: the id is there already, or it could serve nobody.
        """
        if instance.id in self._instances:
            raise InvalidInput(f"rollout instance {instance.id} is there twice")
        if instance.running_max < 1 or instance.queue_max < 0 or instance.context_max < 1:
            raise InvalidInput(f"rollout instance {instance.id}: running_max and context_max are "
                               "at least 1, queue_max at least 0")
        self._instances[instance.id] = instance
        self._on[instance.id] = {}
        self._quiet = False

    def remove(self, instance: int) -> list[int]:
        """It serves no more; the requests that ran there, which must be asked for again. KV that
        lay there is lost."""
        stranded = list(self._on.pop(instance))
        del self._instances[instance]
        for request in stranded:
            del self._at[request]
        self._kv = {r: i for r, i in self._kv.items() if i != instance}
        self._quiet = False
        return stranded

    def load(self, instance: int) -> int:
        """Requests that run or queue there."""
        return len(self._on[instance])

    def load_of(self, instance: int) -> int:
        """As `load`; -1 where it does not serve."""
        return len(self._on[instance]) if instance in self._on else -1

    def at(self, request: int) -> int:
        """The instance where a request runs; -1: none."""
        return self._at.get(request, -1)

    def easy(self, instance: int) -> int:
        """How many requests it holds and is still idle, in the sense of `KvCost`."""
        one = self._instances[instance]
        return min(one.running_max, self._cost.idle * one.step_ns // (1000 * one.request_ns))

    @property
    def instances(self) -> list[RolloutInstance]:
        """All that serve, in order of coming."""
        return list(self._instances.values())

    def waits(self, request: int) -> int:
        """How many are before a request in the line; -1: it is not there. O(line)."""
        return list(self._line).index(request) if request in self._line else -1

    @property
    def line(self) -> list[RouteRequest]:
        """The turns that wait, first come first."""
        return list(self._line.values())

    @property
    def waiting(self) -> int:
        """Requests that no instance has room for."""
        return len(self._line)

    @property
    def pressure(self) -> int:
        """Requests on instances and waiting, in 1/1000 of what may run at once."""
        room = sum(i.running_max for i in self._instances.values())
        return 1000 * (len(self._at) + len(self._line)) // room if room else 1000

    # ---- requests ----------------------------------------------------------------------------

    def ask(self, ask: RouteRequest) -> Route | None:
        """Places a turn, or None: it waits and comes out of `left` or `add`.

        Raises:
            InfeasibleRequest: its context fits on no instance there is.
        """
        if self._instances and not any(ask.context <= i.context_max
                                       for i in self._instances.values()):
            raise InfeasibleRequest(
                f"request {ask.request}: a context of {ask.context} tokens fits on no rollout "
                "instance; serve the model on a larger degree or cut the context")
        self.wait(ask)
        route = None
        for placed in self._advance():
            assert placed.request == ask.request, "somebody else's room was overlooked"
            route = placed
        return route

    def wait(self, ask: RouteRequest) -> None:
        """A turn stands in the line. O(instances)."""
        assert ask.request not in self._at, f"request {ask.request} runs already"
        assert ask.request not in self._line, f"request {ask.request} waits already"
        self._line[ask.request] = ask
        self._quiet = self._quiet and not any(self._room(i, ask)
                                              for i in self._instances.values())

    def next(self) -> Route | None:
        """Where the first goes that can be placed; it still waits. O(those before it in the line +
        instances), once for as long as no room comes."""
        if self._quiet or not self._line:
            return None
        most = max((i.context_max for i in self._instances.values() if self._free(i)), default=-1)
        for ask in self._line.values() if most > 0 else ():
            if ask.context <= most:
                return self._choose(ask)
        self._quiet = True
        return None

    def place(self, request: int, instance: int) -> None:
        """A request that waits goes to an instance, and its KV with it."""
        del self._line[request]
        self._at[request] = self._kv[request] = instance
        self._on[instance][request] = None

    def left(self, request: int) -> list[Route]:
        """A turn ended: its KV stays where it is; who waited may be placed."""
        self.leave(request)
        return self._advance()

    def leave(self, request: int) -> None:
        """A turn ended, running or waiting; a request that is not known is no error."""
        self._line.pop(request, None)
        at = self._at.pop(request, None)
        if at is not None:
            del self._on[at][request]
            self._quiet = False

    def ended(self, request: int) -> list[Route]:
        """The request is over, wherever it is: its KV goes, who waited may be placed."""
        self.forget(request)
        return self._advance()

    def forget(self, request: int) -> None:
        """As `leave`, and its KV goes."""
        self._kv.pop(request, None)
        self.leave(request)

    def planning_copy(self) -> Router:
        """One that goes on from here by itself."""
        router = Router(self._cost)
        router._instances, router._at = dict(self._instances), dict(self._at)
        router._kv = dict(self._kv)
        router._on = {number: dict(there) for number, there in self._on.items()}
        router._line = dict(self._line)
        return router

    def check(self, settled: bool = True) -> None:
        """The laws; `settled`: also that nobody waits who could be placed."""
        for id_, there in self._on.items():
            instance = self._instances[id_]
            assert len(there) <= instance.running_max + instance.queue_max, f"{id_}: too many"
            assert all(self._at[r] == id_ for r in there)
        assert len(self._at) == sum(len(there) for there in self._on.values())
        assert not set(self._at) & set(self._line), "placed and waiting"
        assert all(i in self._instances for i in self._kv.values())
        for ask in self._line.values() if settled or self._quiet else ():
            assert self._choose(ask) is None, f"request {ask.request} waits beside room"

    # ---- the choice --------------------------------------------------------------------------

    def _advance(self) -> list[Route]:
        """Places who waits, first come first; one whose context fits nowhere now blocks nobody."""
        placed = []
        while (route := self.next()) is not None:
            self.place(route.request, route.instance)
            placed.append(route)
        return placed

    def _choose(self, ask: RouteRequest) -> Route | None:
        home = self._instances.get(self._kv.get(ask.request, -1))
        for most in (self._cost.crowded, ANY):  # first those that are not crowded
            for bucket in self._outwards(ask.bucket):
                there = [i for i in self._instances.values() if self._room(i, ask)
                         and (i.bucket == bucket or self._open_to(i, ask, home))
                         and self._crowd(i) <= most]
                if there:
                    return self._worth(ask, home, self._least(there, ask, home))
        return None

    def _least(self, there: list[RolloutInstance], ask: RouteRequest, home: RolloutInstance | None
               ) -> Route:
        """The one with the least expected time; who would queue comes last."""
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

    def _crowd(self, instance: RolloutInstance) -> int:
        """How much its requests lengthen its step, 1/1000."""
        return 1000 * len(self._on[instance.id]) * instance.request_ns // instance.step_ns

    def _open_to(self, instance: RolloutInstance, ask: RouteRequest,
                 home: RolloutInstance | None) -> bool:
        """Whether a larger degree takes a request of a smaller bucket: it has its KV, or idles."""
        return instance.bucket > ask.bucket and (
            instance is home or self._crowd(instance) < self._cost.idle)

    def _worth(self, ask: RouteRequest, home: RolloutInstance | None, route: Route) -> Route:
        """The route, or staying where the KV is, if moving costs too much for what is left."""
        target = self._instances[route.instance]
        if (home is None or home.bucket == target.bucket or not self._room(home, ask)
                or len(self._on[home.id]) >= home.running_max
                or self._cost.worth * route.move_ns <= ask.remaining * self._step(target)):
            return route
        return Route(ask.request, home.id, STAY, 0)

    def _outwards(self, bucket: int) -> list[int]:
        """Buckets by distance, the larger degree first."""
        there = sorted({i.bucket for i in self._instances.values()})
        return sorted(there, key=lambda b: nearness(bucket, b))

    def _room(self, instance: RolloutInstance, ask: RouteRequest) -> bool:
        return ask.context <= instance.context_max and self._free(instance)

    def _free(self, instance: RolloutInstance) -> bool:
        return len(self._on[instance.id]) < instance.running_max + instance.queue_max

    def _step(self, instance: RolloutInstance) -> int:
        """A decode step with one request more than now, ns."""
        return instance.step_ns + instance.request_ns * (len(self._on[instance.id]) + 1)

    def _move(self, home: RolloutInstance | None, to: RolloutInstance,
              context: int) -> tuple[str, int]:
        """How a context gets there: kept, moved, or computed again, whichever is least."""
        again = context * to.prefill_ns
        if home is None:
            return PREFILL, again
        if home.id == to.id:
            return STAY, 0
        token_ns = self._cost.near_ns if home.node == to.node else self._cost.far_ns
        moved = self._cost.base_ns + context * token_ns
        return (TRANSFER, moved) if moved < again else (PREFILL, again)
