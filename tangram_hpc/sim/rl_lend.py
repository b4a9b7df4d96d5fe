"""Lending rollout nodes to training on paper: drives the core's `HybridPool` as workers would.

Law: a node's engines close when its replica is told to join and open again when it has come back;
stages and returns are reported after the scenario's times. Orders are asked for at the beginning of
an optimizer step and when training has nothing to do, so no step loses a helper in its middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..core.hybrid_pool import STAGES, HybridPool, Join, Leave, PoolSignal, Role
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

    def begin(self, now: int, shares: Shares, rollouts: Rollouts,
              opened: Sequence[tuple[Place, int]], mean_context: int,
              back: Callable[[int], None]) -> None:
        """Another split: its rollout nodes may be lent, those of small degrees first."""
        node = self._s.hardware.gpus_per_node
        replica = shares.layout.tp * shares.layout.pp
        self._era += 1
        self._rollouts, self._mean, self._back = rollouts, mean_context, back
        self._places: list[list[Place]] = []
        self._engines: list[list[int]] = []
        nodes = sorted({p.node for p, _ in opened}, reverse=True)
        for number in nodes:
            there = [(p, e) for p, e in opened if p.node == number]
            self._places.append([p for p, _ in there])
            self._engines.append([e for _, e in there])
        self._unit = node
        lendable = len(nodes) if node % replica == 0 else 0
        self._pool = HybridPool(
            self._s.pool, [(range(i * node, (i + 1) * node), 1) for i in range(lendable)],
            cores=shares.layout.dp, reserved=self._s.planner.min_rollout // node)
        self._pool.began_step(self._step)

    @property
    def out(self) -> bool:
        """Whether a node is not with rollout."""
        return self._pool is not None and any(
            r.role is not Role.ROLLOUT for r in self._pool.replicas.values())

    def boundary(self, now: int, train_left_ns: int, starting: bool) -> int:
        """An optimizer step begins: tells the pool what is left of both stages (of rollout what is
        believed), carries out its orders; the GPUs that help in this step. `starting`: a batch is
        about to begin."""
        pool = self._pool
        assert pool is not None, "a split comes first"
        self._step += 1
        self._signal(train_left_ns, self._rollouts.left_ns(), starting)
        # who leaves does so before the step; who joins counts from a later one
        self._carry_out(now, pool.plan(now))
        return len(pool.began_step(self._step)) * self._unit

    def idle(self, now: int) -> None:
        """Training has nothing to do: everybody goes back."""
        if self._pool is not None:
            self._carry_out(now, self._pool.recall(now))

    def _signal(self, train_ns: int, rollout_ns: int, starting: bool) -> None:
        assert self._pool is not None
        self._version += 1
        pressure = 1000 if starting else 1000 * self._rollouts.under_way // self._s.batch
        self._pool.signalled(PoolSignal(self._version, self._step, train_ns, rollout_ns, pressure))

    def _carry_out(self, now: int, orders: Sequence[Join | Leave]) -> None:
        assert self._pool is not None
        pauses, era = self._s.pauses, self._era
        for order in orders:
            if isinstance(order, Join):
                for engine in self._engines[order.replica]:
                    self._rollouts.close(now, engine)
                self._engines[order.replica] = []
                self._after(now + round(pauses.to_train_s * _SECOND),
                            partial(self._arrived, era, order.replica, order.generation))
            else:
                self._after(now + round(pauses.to_rollout_s * _SECOND),
                            partial(self._returned, era, order.replica, order.generation))
        self._pool.check()

    def _arrived(self, era: int, replica: int, generation: int, _now: int) -> None:
        if era == self._era and self._pool is not None:
            for stage in STAGES[1:]:
                self._pool.reached(replica, generation, 0, stage)

    def _returned(self, era: int, replica: int, generation: int, now: int) -> None:
        if era != self._era or self._pool is None:
            return
        if self._pool.returned(replica, generation, 0):
            self._engines[replica] = [self._rollouts.open(now, place, self._mean)
                                      for place in self._places[replica]]
            self._back(now)
