"""Lending rollout nodes to training on paper: drives the core's `HybridPool` as coordinator and
members would. A member is a node here, so a replica has one; a core is as much of the trainer as a
node is.

Law: a node's engines close when it is asked to join and open again when it has come back; what is
asked takes the scenario's times, and who follows says so when the step that it followed is over.
Nobody counts or ceases to but between two optimizer steps; what a node that died had in a step is
not used. As many nodes are wanted in training as rollout can spare: those that are left hold all
trajectories under way, and that wait to start, and idle nearly. No new ones come before a batch has
been trained, so what is spare stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ...domain.hybrid import (
    AnyPoolEvent,
    Ask,
    Kill,
    MemberDone,
    MemberLost,
    MemberUp,
    ReplicaState,
    Role,
    Signal,
    StepBegins,
    StepPlan,
)
from ..hybrid.hybrid_pool import HybridPool
from .rl_rollout import After, Place, Rollouts
from .rl_scenario import Scenario
from .rl_systems import Shares

_SECOND = 10**9


class Lending:
    """The pool of one split after the other."""

    def __init__(self, scenario: Scenario, after: After) -> None:
        self._s, self._after = scenario, after
        self._version = self._step = self._era = 0
        self._pool: HybridPool | None = None
        self._unit = scenario.hardware.gpus_per_node
        self._counting: dict[int, int] = {}  # node -> incarnation, of those that help in this step
        self._incarnations = 0
        self._follow: list[Ask] = []  # who follows the running step, with zero
        self._train_ns = self._rollout_ns = 0  # of a batch, of late
        self._waits = False  # training waits for rollouts, which then spare nobody

    def begin(self, now: int, shares: Shares, rollouts: Rollouts, engines: dict[int, list[int]],
              back: Callable[[int], None]) -> None:
        """Another split: its rollout nodes may be lent, those of small degrees first. `engines`:
        those of each node that lives."""
        self._era += 1
        self._rollouts, self._back = rollouts, back
        self._places: dict[int, list[Place]] = {}
        for place in shares.places:
            self._places.setdefault(place.node, []).append(place)
        nodes = sorted(self._places, reverse=True)
        whole = self._unit % (shares.layout.tp * shares.layout.pp) == 0
        lendable = nodes if whole else []
        others = range(max(nodes, default=0) + 1, max(nodes, default=0) + 1 + shares.layout.dp)
        self._pool = HybridPool(
            replace(self._s.pool, reserved_gpus=-(-self._s.planner.min_rollout // self._unit)),
            [[node] for node in others], [n for n in nodes if n not in lendable],
            [[node] for node in lendable])
        self._counting, self._follow = {}, []
        # by node, in the order of lending; of one that cannot be lent the pipeline takes care
        self._engines = {node: list(engines.get(node, ())) for node in lendable}
        self._most = len(nodes) - 1 if lendable else 0
        self._incarnation: dict[int, int] = {}
        for node in lendable:
            if node in engines:
                self._rises(now, node)

    def owns(self, node: int) -> bool:
        """Whether it is one that may be lent."""
        return node in self._engines

    def dies(self, now: int, node: int) -> None:
        """A node that may be lent is gone, wherever it is."""
        closed, self._engines[node] = self._engines[node], []
        self._rollouts.close(now, closed)
        self._follow = [other for other in self._follow if other.member != node]
        self._tell(now, MemberLost(node, self._incarnation.pop(node), "died"))

    def returns(self, now: int, node: int) -> None:
        """It is back, and serves, unless it is asked to join at once."""
        self._engines[node] = [self._rollouts.open(now, p) for p in self._places[node]]
        self._rises(now, node)

    def _rises(self, now: int, node: int) -> None:
        self._incarnations += 1
        self._incarnation[node] = self._incarnations
        self._tell(now, MemberUp(node, self._incarnations))

    def closed(self, engine: int) -> None:
        """An engine died; its node lives."""
        for engines in self._engines.values():
            if engine in engines:
                engines.remove(engine)

    def reopen(self, now: int, place: Place) -> None:
        """It is back, unless its node is not with rollout, or has come back itself meanwhile."""
        assert self._pool is not None
        there = [self._rollouts.place(e) for e in self._engines[place.node]]
        with_rollout = self._pool.roles()[place.node] is Role.HYBRID_ROLLOUT
        if with_rollout and there.count(place) < self._places[place.node].count(place):
            self._engines[place.node].append(self._rollouts.open(now, place))

    def check(self) -> None:
        """The laws: who is not with rollout has no engine, and who counts lives."""
        assert self._pool is not None
        roles = self._pool.roles()
        for node, engines in self._engines.items():
            assert not engines or roles[node] is Role.HYBRID_ROLLOUT, f"{node} is in two roles"
            assert (node in self._incarnation) is (roles[node] is not Role.LOST)

    def used(self) -> int:
        """The GPUs whose gradients are used in the step that ends: of those that counted from its
        beginning and still live."""
        return self._unit * sum(self._incarnation.get(node) == incarnation
                                for node, incarnation in self._counting.items())

    @property
    def out(self) -> bool:
        """Whether a node is not with rollout."""
        return self._pool is not None and any(
            role in (Role.HYBRID_JOINING, Role.HYBRID_TRAINING)
            for role in self._pool.roles().values())

    def boundary(self, now: int, demand: int) -> int:
        """An optimizer step begins, with so many trajectories under way or waiting to start;
        carries out the pool's orders; the GPUs that help in this step."""
        assert self._pool is not None, "a split comes first"
        followed, self._follow = self._follow, []
        for ask in followed:
            self._tell(now, _done(ask))
        self.demand(now, demand)
        self._next_step(now)
        return len(self._counting) * self._unit

    def trained(self, train_ns: int, rollout_ns: int) -> None:
        """What both stages took for a batch, training without help."""
        # half of what was and half of what is: a batch is sometimes whole by chance when wanted
        self._train_ns = (self._train_ns + train_ns) // 2
        self._rollout_ns = (self._rollout_ns + rollout_ns) // 2
        self._waits = (
            self._train_ns * 1000 <= self._s.pool.leave_permille * self._rollout_ns)

    def demand(self, now: int, demand: int) -> None:
        """So many trajectories are under way or wait to start."""
        self._signal(now, 0 if self._waits else self._spare(demand))

    def home(self, now: int) -> None:
        """Everybody goes back, as between two steps."""
        if self.out:
            self._signal(now, 0)
            self._next_step(now)

    def _spare(self, demand: int) -> int:
        """How many nodes rollout can spare, in the order in which they are lent; who is dead, on
        the way home or not asked again yet is none of them, as another one would be lent in its
        place."""
        assert self._pool is not None
        room = {i.id: self._rollouts.router.easy(i.id)
                for i in self._rollouts.router.instances}
        left = sum(room.values())
        spare = 0
        for number, (node, engines) in enumerate(self._engines.items()):
            away = (node not in self._incarnation
                    or self._pool.state(number) is ReplicaState.RETURNING)
            if away or self._pool.rests(number):
                continue
            # of those that are lent already none serves
            left -= sum(room[e] for e in engines)
            if left < demand:
                break
            spare += 1
        return min(spare, self._most)

    def _signal(self, now: int, planned: int) -> None:
        """`planned` nodes are wanted in training, or none at all."""
        self._version += 1
        self._tell(now, Signal(self._version, self._step, 0, 0 if planned else 1, 0, planned))

    def _next_step(self, now: int) -> None:
        self._step += 1
        self._tell(now, StepBegins(self._step, self._step))

    def _tell(self, now: int, event: AnyPoolEvent) -> None:
        assert self._pool is not None
        for order in [*self._pool.tick(now), *self._pool.handle(event, now)]:
            if isinstance(order, Ask):
                self._asked(now, order)
            elif isinstance(order, StepPlan):
                nodes = [self._pool.replicas[one.replica][0] for one in order.counting]
                self._counting = {node: self._incarnation[node] for node in nodes}
            assert not isinstance(order, Kill), "the scenario's pauses are longer than is waited"

    def _asked(self, now: int, ask: Ask) -> None:
        if ask.stage is ReplicaState.REQUESTED:
            closed, self._engines[ask.member] = self._engines[ask.member], []
            self._rollouts.close(now, closed)
            self._later(now, self._s.pauses.to_train_s, ask)
        elif ask.stage is ReplicaState.RETURNING:
            self._follow = [other for other in self._follow if other.member != ask.member]
            self._later(now, self._s.pauses.to_rollout_s, ask)
        elif ask.stage is ReplicaState.ZERO_SYNC:
            self._follow.append(ask)
        else:  # its time was counted when it was asked to join
            self._later(now, 0.0, ask)

    def _later(self, now: int, seconds: float, ask: Ask) -> None:
        self._after(now + round(seconds * _SECOND), partial(self._did, self._era, ask))

    def _did(self, era: int, ask: Ask, now: int) -> None:
        if era != self._era or self._incarnation.get(ask.member) != ask.incarnation:
            return  # of a split, or of an incarnation, that is over
        self._tell(now, _done(ask))
        assert self._pool is not None
        if (ask.stage is ReplicaState.RETURNING
                and self._pool.roles()[ask.member] is Role.HYBRID_ROLLOUT):
            self._engines[ask.member] = [self._rollouts.open(now, place)
                                         for place in self._places[ask.member]]
            self._back(now)


def _done(ask: Ask) -> MemberDone:
    return MemberDone(ask.member, ask.incarnation, ask.generation, ask.stage)
