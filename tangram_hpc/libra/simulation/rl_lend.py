"""Simulated lending of rollout nodes to training, decided by the real `HybridPool`.

This module plays the coordinator and the members. A member is a whole node here, so a replica has
one member, and a core is a part of the trainer as large as a node. The stages of a join take the
scenario's times; a member that follows a step reports when that step has ended.

Training gets as many nodes as rollout can spare: the engines of the remaining nodes must be able to
take all trajectories that run or wait and still be nearly idle. No new trajectories come before a
batch has been trained, so a spare node stays spare.

Invariants: a node's engines close when it is asked to join and open again when it has come back. A
node begins and stops counting only between two optimizer steps. The gradients of a node that died
in a step are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ...domain.hybrid import (
    AnyPoolEvent,
    KillMember,
    MemberDone,
    MemberLost,
    MemberUp,
    PipelineSignal,
    ReplicaState,
    Role,
    StageOrder,
    StepBegins,
    StepPlan,
)
from ..hybrid.hybrid_pool import HybridPool
from .rl_rollout import After, EnginePlan, SimulatedRollouts
from .rl_scenario import Scenario
from .rl_systems import Shares

_SECOND = 10**9


class Lending:
    """Runs the hybrid pool of one split after the other."""

    def __init__(self, scenario: Scenario, after: After) -> None:
        self._s, self._after = scenario, after
        self._version = self._step = self._era = 0
        self._pool: HybridPool | None = None
        self._unit = scenario.hardware.gpus_per_node
        # node -> incarnation, for the nodes that help in this step.
        self._counting: dict[int, int] = {}
        self._incarnations = 0
        self._follow: list[StageOrder] = []  # members that follow the running step with zeros
        self._train_ns = self._rollout_ns = 0  # smoothed times of a batch
        self._waits = False  # whether training waits for rollouts, which then spare no node

    def begin(self, now: int, shares: Shares, rollouts: SimulatedRollouts,
              engines: dict[int, list[int]], back: Callable[[int], None]) -> None:
        """Begins with another split. Its rollout nodes may be lent, nodes with small degrees first.

        `engines` holds the engines of each node that lives.
        """
        self._era += 1
        self._rollouts, self._back = rollouts, back
        self._places: dict[int, list[EnginePlan]] = {}
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
        # the engines of nodes that may be lent, in the order of lending
        self._engines = {node: list(engines.get(node, ())) for node in lendable}
        self._most = len(nodes) - 1 if lendable else 0
        self._incarnation: dict[int, int] = {}
        for node in lendable:
            if node in engines:
                self._rises(now, node)

    def owns(self, node: int) -> bool:
        """Whether a node may be lent in this split."""
        return node in self._engines

    def dies(self, now: int, node: int) -> None:
        """Notes the death of a node that may be lent, in any role."""
        closed, self._engines[node] = self._engines[node], []
        self._rollouts.close(now, closed)
        self._follow = [other for other in self._follow if other.member != node]
        self._tell(now, MemberLost(node, self._incarnation.pop(node), "died"))

    def returns(self, now: int, node: int) -> None:
        """Notes that a node is back. It serves rollouts unless it is asked to join at once."""
        self._engines[node] = [self._rollouts.open(now, p) for p in self._places[node]]
        self._rises(now, node)

    def _rises(self, now: int, node: int) -> None:
        self._incarnations += 1
        self._incarnation[node] = self._incarnations
        self._tell(now, MemberUp(node, self._incarnations))

    def closed(self, engine: int) -> None:
        """Notes that an engine died although its node lives."""
        for engines in self._engines.values():
            if engine in engines:
                engines.remove(engine)

    def reopen(self, now: int, place: EnginePlan) -> None:
        """Opens an engine again if its node is in rollout and has not opened it itself."""
        assert self._pool is not None
        there = [self._rollouts.place(e) for e in self._engines[place.node]]
        with_rollout = self._pool.roles()[place.node] is Role.HYBRID_ROLLOUT
        if with_rollout and there.count(place) < self._places[place.node].count(place):
            self._engines[place.node].append(self._rollouts.open(now, place))

    def check(self) -> None:
        """Asserts that only nodes in rollout have engines, and that a node is LOST or lives."""
        assert self._pool is not None
        roles = self._pool.roles()
        for node, engines in self._engines.items():
            assert not engines or roles[node] is Role.HYBRID_ROLLOUT, f"{node} is in two roles"
            assert (node in self._incarnation) is (roles[node] is not Role.LOST)

    def used(self) -> int:
        """The number of GPUs whose gradients are used at the step's end: their nodes counted and
        still live.
        """
        return self._unit * sum(self._incarnation.get(node) == incarnation
                                for node, incarnation in self._counting.items())

    @property
    def out(self) -> bool:
        """Whether any node is joining or in training."""
        return self._pool is not None and any(
            role in (Role.HYBRID_JOINING, Role.HYBRID_TRAINING)
            for role in self._pool.roles().values())

    def boundary(self, now: int, demand: int) -> int:
        """Begins an optimizer step; returns the GPUs that help in it.

        `demand` is the number of trajectories that run or wait to start.
        """
        assert self._pool is not None, "a split comes first"
        followed, self._follow = self._follow, []
        for ask in followed:
            self._tell(now, _done(ask))
        self.demand(now, demand)
        self._next_step(now)
        return len(self._counting) * self._unit

    def trained(self, train_ns: int, rollout_ns: int) -> None:
        """Notes how long both stages took for a batch, in ns; the training time is that without
        help.
        """
        # averaged, as some batches are complete in time by chance
        self._train_ns = (self._train_ns + train_ns) // 2
        self._rollout_ns = (self._rollout_ns + rollout_ns) // 2
        self._waits = (
            self._train_ns * 1000 <= self._s.pool.leave_permille * self._rollout_ns)

    def demand(self, now: int, demand: int) -> None:
        """Takes the changed number of trajectories that run or wait to start."""
        self._signal(now, 0 if self._waits else self._spare(demand))

    def home(self, now: int) -> None:
        """Calls all nodes back."""
        if self.out:
            self._signal(now, 0)
            self._next_step(now)

    def _spare(self, demand: int) -> int:
        """How many nodes rollout can spare, in the order in which they are lent.

        Nodes that are dead, on their way back, or may not join again yet are not counted, because
        another node would be lent in their place.
        """
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
            # without the engines of nodes that are lent already
            left -= sum(room[e] for e in engines)
            if left < demand:
                break
            spare += 1
        return min(spare, self._most)

    def _signal(self, now: int, planned: int) -> None:
        """Tells the pool that `planned` nodes are wanted in training; 0 calls all back."""
        self._version += 1
        self._tell(now, PipelineSignal(self._version, self._step, 0, 0 if planned else 1, 0,
                                       planned))

    def _next_step(self, now: int) -> None:
        self._step += 1
        self._tell(now, StepBegins(self._step, self._step))

    def _tell(self, now: int, event: AnyPoolEvent) -> None:
        assert self._pool is not None
        for order in [*self._pool.tick(now), *self._pool.handle(event, now)]:
            if isinstance(order, StageOrder):
                self._asked(now, order)
            elif isinstance(order, StepPlan):
                nodes = [self._pool.replicas[one.replica][0] for one in order.counting]
                self._counting = {node: self._incarnation[node] for node in nodes}
            assert not isinstance(order, KillMember), (
                "a pause of the scenario is longer than the pool waits")

    def _asked(self, now: int, ask: StageOrder) -> None:
        if ask.stage is ReplicaState.REQUESTED:
            closed, self._engines[ask.member] = self._engines[ask.member], []
            self._rollouts.close(now, closed)
            self._later(now, self._s.pauses.to_train_s, ask)
        elif ask.stage is ReplicaState.RETURNING:
            self._follow = [other for other in self._follow if other.member != ask.member]
            self._later(now, self._s.pauses.to_rollout_s, ask)
        elif ask.stage is ReplicaState.ZERO_SYNC:
            self._follow.append(ask)
        else:  # the time was counted when the node was asked to join
            self._later(now, 0.0, ask)

    def _later(self, now: int, seconds: float, ask: StageOrder) -> None:
        self._after(now + round(seconds * _SECOND), partial(self._did, self._era, ask))

    def _did(self, era: int, ask: StageOrder, now: int) -> None:
        if era != self._era or self._incarnation.get(ask.member) != ask.incarnation:
            return  # the order was for a split or an incarnation that is over
        self._tell(now, _done(ask))
        assert self._pool is not None
        if (ask.stage is ReplicaState.RETURNING
                and self._pool.roles()[ask.member] is Role.HYBRID_ROLLOUT):
            self._engines[ask.member] = [self._rollouts.open(now, place)
                                         for place in self._places[ask.member]]
            self._back(now)


def _done(ask: StageOrder) -> MemberDone:
    return MemberDone(ask.member, ask.incarnation, ask.generation, ask.stage)
