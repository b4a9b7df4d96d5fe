"""Lending rollout nodes to training on paper: drives the core's `HybridPool` as desk and members
would. A member is a node here, so a replica has one; a core is as much of the trainer as a node is.

Law: a node's engines close when it is asked to join and open again when it has come back; what is
asked takes the scenario's times, and who follows says so when the step that it followed is over.
Nobody counts or ceases to but between two optimizer steps. As many nodes are wanted in training as
rollout can spare: those that are left hold all trajectories under way, and that wait to start,
and idle nearly. No new ones come before a batch has been trained, so what is spare stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..core.hybrid_pool import HybridPool
from ..domain.hybrid import (
    AnyFact,
    Ask,
    Kill,
    MemberDone,
    MemberUp,
    ReplicaState,
    Role,
    Signal,
    StepBegins,
    StepPlan,
)
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
        self._counting = 0
        self._follow: list[Ask] = []  # who follows the running step, with zero

    def begin(self, now: int, shares: Shares, rollouts: Rollouts,
              opened: Sequence[tuple[Place, int]], back: Callable[[int], None]) -> None:
        """Another split: its rollout nodes may be lent, those of small degrees first."""
        self._era += 1
        self._rollouts, self._back = rollouts, back
        self._places: dict[int, list[Place]] = {}
        self._engines: dict[int, list[int]] = {}  # by node, in the order of lending
        for place, engine in opened:
            self._places.setdefault(place.node, []).append(place)
            self._engines.setdefault(place.node, []).append(engine)
        nodes = sorted(self._places, reverse=True)
        whole = self._unit % (shares.layout.tp * shares.layout.pp) == 0
        lendable = nodes if whole else []
        others = range(max(nodes, default=0) + 1, max(nodes, default=0) + 1 + shares.layout.dp)
        self._pool = HybridPool(
            replace(self._s.pool, reserved_gpus=-(-self._s.planner.min_rollout // self._unit)),
            [[node] for node in others], [n for n in nodes if n not in lendable],
            [[node] for node in lendable])
        self._counting, self._follow = 0, []
        self._engines = {node: self._engines[node] for node in lendable}
        self._most = len(nodes) - 1 if lendable else 0
        for node in lendable:
            self._tell(now, MemberUp(node, self._era))

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
        return self._counting * self._unit

    def demand(self, now: int, demand: int) -> None:
        """So many trajectories are under way or wait to start."""
        self._signal(now, self._spare(demand))

    def home(self, now: int) -> None:
        """Everybody goes back, as between two steps."""
        if self.out:
            self._signal(now, 0)
            self._next_step(now)

    def _spare(self, demand: int) -> int:
        """How many nodes rollout can spare, in the order in which they are lent."""
        room = {i.id: self._rollouts.router.easy(i.id)
                for i in self._rollouts.router.instances}
        left = sum(room.values())
        spare = 0
        for engines in self._engines.values():  # none of those that are lent already
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

    def _tell(self, now: int, fact: AnyFact) -> None:
        assert self._pool is not None
        for order in [*self._pool.tick(now), *self._pool.handle(fact, now)]:
            if isinstance(order, Ask):
                self._asked(now, order)
            elif isinstance(order, StepPlan):
                self._counting = len(order.counting)
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
        if era != self._era:
            return  # of a split that is over
        self._tell(now, _done(ask))
        if ask.stage is ReplicaState.RETURNING:
            self._engines[ask.member] = [self._rollouts.open(now, place)
                                         for place in self._places[ask.member]]
            self._back(now)


def _done(ask: Ask) -> MemberDone:
    return MemberDone(ask.member, ask.life, ask.generation, ask.stage)
