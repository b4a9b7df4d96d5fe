"""A hybrid pool that a test drives by hand, with its clock and all its orders."""

from __future__ import annotations

from typing import Any

from tangram_hpc.domain.hybrid import (
    AnyOrder,
    AnyPoolEvent,
    JoinCancelled,
    MemberDone,
    MemberFailed,
    MemberUp,
    PipelineSignal,
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
    """A pool with its clock and all orders that it gave."""

    def __init__(self, **rules: Any) -> None:
        self.pool = pool_of(**rules)
        self.now, self.step, self.version = 0, -1, 0
        self.orders: list[AnyOrder] = []
        self._seen = 0

    def new(self) -> list[AnyOrder]:
        """The orders since this was called last."""
        new, self._seen = self.orders[self._seen :], len(self.orders)
        return new

    def tell(self, event: AnyPoolEvent) -> list[AnyOrder]:
        new = self.pool.handle(event, self.now)
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
        return self.tell(PipelineSignal(self.version, self.step, *times, **more))

    def done(self, replica: int, stage: R) -> list[AnyOrder]:
        generation = self.pool.generation(replica)
        return [order for gpu in REPLICAS[replica]
                for order in self.tell(MemberDone(gpu, 0, generation, stage))]

    def to(self, replica: int, state: R) -> None:
        """Brings a replica that was asked to join to this state."""
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


def stale(pool: HybridPool, event: AnyPoolEvent) -> bool:
    """Whether an event is of another incarnation, generation, stage, step or version than the
    current."""
    if isinstance(event, StepBegins):
        return event.step <= pool._step
    if isinstance(event, PipelineSignal):
        last = pool._target._signal
        return last is not None and event.version <= last.version
    if isinstance(event, JoinCancelled):
        return not 0 <= event.replica < 3 or event.generation != pool.generation(event.replica)
    if event.member not in HYBRID:
        return True
    member = pool._members[event.member]
    if isinstance(event, MemberUp):
        return event.incarnation <= member.incarnation
    if not member.alive or event.incarnation != member.incarnation:
        return True
    n = next(n for n, gpus in enumerate(REPLICAS) if event.member in gpus)
    if isinstance(event, (MemberDone, MemberFailed)) and event.generation != pool.generation(n):
        return True
    return isinstance(event, MemberDone) and event.stage is not pool.state(n)
