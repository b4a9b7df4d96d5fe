"""A hybrid pool with its clock, driven by hand, and what it has ordered."""

from __future__ import annotations

from typing import Any

from tangram_hpc.domain.hybrid import (
    AnyFact,
    AnyOrder,
    JoinCancelled,
    MemberDone,
    MemberFailed,
    MemberUp,
    Signal,
    StepBegins,
    StepPlan,
)
from tangram_hpc.domain.hybrid import ReplicaState as R
from tangram_hpc.libra.hybrid.hybrid_pool import HybridPool
from tangram_hpc.libra.hybrid.hybrid_signal import PoolRules

S = 10**9
CORE, ROLLOUT, REPLICAS = ((0, 1), (2, 3)), (4, 5), ((6, 7), (8, 9), (10, 11))
HYBRID = [gpu for gpus in REPLICAS for gpu in gpus]
ASKED = (R.REQUESTED, R.FETCHING_STATE, R.ZERO_SYNC, R.RETURNING)
TRAIN, KEEP, BACK = (1200, 1000), (1000, 1000), (800, 1000)  # T_train, T_rollout


def pool_of(up: bool = True, **rules: Any) -> HybridPool:
    pool = HybridPool(PoolRules(**rules), CORE, ROLLOUT, REPLICAS)
    for gpu in HYBRID if up else ():
        assert pool.handle(MemberUp(gpu, 0), 0) == []
    return pool


class Rig:
    """A pool with its clock, and what it has ordered."""

    def __init__(self, **rules: Any) -> None:
        self.pool = pool_of(**rules)
        self.now, self.step, self.version = 0, -1, 0
        self.orders: list[AnyOrder] = []
        self._seen = 0

    def new(self) -> list[AnyOrder]:
        """What was ordered since this was asked last."""
        new, self._seen = self.orders[self._seen :], len(self.orders)
        return new

    def tell(self, fact: AnyFact) -> list[AnyOrder]:
        new = self.pool.handle(fact, self.now)
        self.orders += new
        return new

    def tick(self, after_s: int) -> list[AnyOrder]:
        self.now += after_s * S
        new = self.pool.tick(self.now)
        self.orders += new
        return new

    def begin(self) -> StepPlan:
        self.step += 1
        plan = self.tell(StepBegins(self.step, self.step))[-1]
        assert isinstance(plan, StepPlan)
        return plan

    def signal(self, times: tuple[int, int] = TRAIN, **more: Any) -> list[AnyOrder]:
        self.version += 1
        return self.tell(Signal(self.version, self.step, *times, **more))

    def done(self, replica: int, stage: R) -> list[AnyOrder]:
        generation = self.pool.generation(replica)
        return [order for gpu in REPLICAS[replica]
                for order in self.tell(MemberDone(gpu, 0, generation, stage))]

    def to(self, replica: int, state: R) -> None:
        """Brings a replica that was asked to join as far as this."""
        while self.pool.state(replica) in ASKED[:3] and self.pool.state(replica) is not state:
            self.done(replica, self.pool.state(replica))
        if self.pool.state(replica) is not state:
            self.begin()
        if state is R.LEAVING:
            self.tell(JoinCancelled(replica, self.pool.generation(replica)))
        assert self.pool.state(replica) is state


def picture(pool: HybridPool) -> str:
    return repr((pool._replicas, pool._members, pool._counting, pool._step, pool.epoch,
                 pool._target.wanted, pool._target._signal))


def stale(pool: HybridPool, fact: AnyFact) -> bool:
    """Whether it speaks of another incarnation, generation, stage, step or version than is going
    on."""
    if isinstance(fact, StepBegins):
        return fact.step <= pool._step
    if isinstance(fact, Signal):
        last = pool._target._signal
        return last is not None and fact.version <= last.version
    if isinstance(fact, JoinCancelled):
        return not 0 <= fact.replica < 3 or fact.generation != pool.generation(fact.replica)
    if fact.member not in HYBRID:
        return True
    member = pool._members[fact.member]
    if isinstance(fact, MemberUp):
        return fact.incarnation <= member.incarnation
    if not member.alive or fact.incarnation != member.incarnation:
        return True
    n = next(n for n, gpus in enumerate(REPLICAS) if fact.member in gpus)
    if isinstance(fact, (MemberDone, MemberFailed)) and fact.generation != pool.generation(n):
        return True
    return isinstance(fact, MemberDone) and fact.stage is not pool.state(n)
