"""One rank of the reference trainer, and the replica that may join it: the example of a trainer
that uses tangram_hpc.

    mpiexec -n 2 python -m tangram_hpc.hooks.reference.reference_rank PLAN.json :
        -n 1 tangram gateway

The steps follow each other. When half of a step's trajectories have ended, the trajectories of the
next step begin; their turns run on services, their tools in sandboxes. Each step computes gradients
from its own trajectories (on the ranks, and on the replica if the hybrid pool has lent one), adds
them up over MPI, applies Adam, and publishes the new weights. With and without the pool the same
weights result, except for rounding and the order in which service copies load new weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tangram_hpc
from tangram_hpc.training import (
    CoreTrainer,
    Member,
    PipelineSignal,
    PoolRules,
    ReplicaState,
    Request,
    add_leased_member,
    publish_weights,
    read_access,
)

from . import reference_task as task
from .reference_model import LONGEST, Policy
from .reference_planning import Planned
from .reference_rollouts import Batch, RolloutDriver
from .reference_routes import SERVICES, Routes, routes
from .reference_run import RunPlan
from .reference_turns import credits

LEASED = 1000  # the member number of the one replica that may be lent


class Adam:
    """The optimizer, on one vector. All ranks apply the same gradients, so their states are
    equal."""

    def __init__(self, lr: float) -> None:
        self._lr, self._t = lr, 0
        self._m: Any = 0.0
        self._v: Any = 0.0

    def step(self, params: NDArray[Any], gradient: NDArray[Any]) -> NDArray[Any]:
        """Returns the next parameters."""
        self._t += 1
        self._m = 0.9 * self._m + 0.1 * gradient
        self._v = 0.99 * self._v + 0.01 * gradient**2
        m, v = self._m / (1 - 0.9**self._t), self._v / (1 - 0.99**self._t)
        moved: NDArray[Any] = (params - self._lr * m / (np.sqrt(v) + 1e-8)).astype(params.dtype)
        return moved


# ---- a rank of the core --------------------------------------------------------------------------


class ReferenceTrainer:
    """One rank of the core trainer."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._client = tangram_hpc.connect(name="trainer")
        comm = self._comm = tangram_hpc.comm
        self._fresh = Path(plan.served, "fresh")
        model = str(Path(plan.served, "model"))
        self._policy = Policy(Path(model), plan.device)
        self._params, self._adam = self._policy.vector(), Adam(plan.lr)
        if plan.base and comm.rank == 0:  # the services still have the weights of the run before
            publish_weights(self._fresh, plan.base, self._policy.named(self._params))
        settle(comm.Ibarrier())
        for name, degree in SERVICES.items():  # every rank declares the same, which is harmless
            self._client.register_service(name, {
                "backend": "torch", "model": model, "fresh": str(self._fresh), "threads": degree,
                "max_len": LONGEST, "batch_wait_ms": 8, "batch": 256})
        self._routes: Routes = routes(self._client, plan.router, f"policy-{plan.base}")
        self._rollouts = RolloutDriver(self._client, self._routes, plan.sandboxes, plan.group,
                                       plan.seed)
        self._planned = Planned(comm.size, plan.slots, 1, plan.prompts * plan.group * comm.size,
                                plan.hidden) if plan.planner else None
        access = Path(plan.folder, "hybrid.json")
        lent = [[LEASED]] if plan.pool else []
        self._core = CoreTrainer(
            comm, access, [[rank] for rank in range(comm.size)],
            [LEASED + 1 + n for n in range(plan.slots - len(lent))], lent,
            rules=PoolRules(reserved_gpus=1), patience_s=120.0, silence_s=120.0)
        if self._core.coordinator is not None and lent:
            def start(number: int, incarnation: int) -> tangram_hpc.Future:
                return self._client.submit(
                    serve_member, str(access), number, incarnation, model, plan.device, gpus=1,
                    retries=0, name="replica")

            add_leased_member(self._core.coordinator, LEASED, 0, start)

    def run(self) -> list[dict[str, Any]]:
        """Runs all steps; returns the metrics of each."""
        plan, told = self._plan, []
        coming = self._begin(0)
        for step in range(plan.steps):
            began = time.monotonic()
            batch = coming
            self._rollouts.half(batch)
            coming = self._begin(step + 1)
            self._rollouts.finish(batch)
            # a step trains when the trajectories of all ranks have ended
            settle(self._comm.Ibarrier())
            rolled = time.monotonic()
            samples = _samples(batch, self._plan.group)
            total, counted = self._core.step(step, step, self._params, samples,
                                             self._policy.gradient)
            sums = self._reduced(total, _counts(batch))
            requests = self._requests(batch)
            self._params = self._adam.step(self._params, sums[:-_COUNTS] / sums[-_COUNTS])
            if self._comm.rank == 0:
                publish_weights(self._fresh, plan.base + step + 1, self._policy.named(self._params))
            now = time.monotonic()
            helped, rollout_s = len(counted.counting), float(sums[-1] / self._comm.size)
            self._signal(step, helped, now - rolled, rollout_s, requests)
            count, reward, solved, turns = (float(each) for each in sums[-_COUNTS:-1])
            told.append({"step": step, "reward": reward / count, "solved": solved / count,
                         "turns": turns / count, "step_s": now - began, "train_s": now - rolled,
                         "rollout_s": rollout_s, "replicas": helped,
                         "stale": plan.base + step - batch.oldest})
        self._rollouts.finish(coming)
        return told

    def close(self) -> dict[str, Any]:
        """Ends the rank in order; returns what the pool, the planner and the router did."""
        coordinator, channel = self._core.coordinator, self._core.channel
        ended = coordinator.ended_joins if coordinator else []
        news = [[n.generation, n.end.value, n.reason] for n in ended]
        told = {"news": news, "added": channel.added, "ignored": dict(channel.ignored),
                "plan": self._planned.log if self._planned else []}
        told |= {"turns": self._summed(self._routes.tally()), "router": self._routes.told()}
        settle(self._comm.Ibarrier())  # another rank may still need the services
        self._rollouts.close()
        self._core.close()
        self._client.close()
        return told

    def _begin(self, step: int) -> Batch:
        plan, rank = self._plan, self._comm.rank
        every = task.prompts(step, plan.prompts * self._comm.size, plan.seed)
        mine = [(n, prompt) for n, prompt in enumerate(every) if n % self._comm.size == rank]
        return self._rollouts.begin(step, mine, plan.base + max(0, step - plan.stale))

    def _reduced(self, total: NDArray[Any], more: list[float]) -> NDArray[Any]:
        sums = np.concatenate([total.astype(np.float64), more])
        self._comm.Allreduce(sums.copy(), sums)
        return sums

    def _summed(self, mine: dict[str, int]) -> dict[str, int]:
        """The sums of all ranks' counts."""
        names = [*SERVICES, "judged", "right", "long"]
        every = np.array([mine.get(name, 0) for name in names], np.int64)
        self._comm.Allreduce(every.copy(), every)
        return dict(zip(names, every.tolist(), strict=True))

    def _requests(self, batch: Batch) -> list[Request]:
        """The lengths and tool times of all ranks' trajectories of a step, for the planner."""
        mine = np.array([(len(one.tokens) - one.generated, one.generated, round(live.tool_s * 1e9))
                         for live in batch.lives for one in [live.trajectory]], np.int64)
        every = np.zeros((self._comm.size, *mine.shape), np.int64)
        self._comm.Allgather(mine, every)
        return [Request(*map(int, row)) for row in every.reshape(-1, 3)]

    def _signal(self, step: int, helped: int, train_s: float, rollout_s: float,
                requests: list[Request]) -> None:
        """Reports the measured times to the pool, and how many replicas should train from the next
        step on; waits until a replica that the pool requested has started. If none should train,
        the training time is reported as 0, because the pool would otherwise decide by the ratio of
        both times."""
        coordinator, plan = self._core.coordinator, self._plan
        if coordinator is None or not plan.pool:
            return
        if self._planned is not None:
            wanted = self._planned.step(step, helped, train_s, rollout_s, requests)
        else:
            wanted = int(plan.lend[0] <= step + 1 < plan.lend[1])
        train_ns = round(train_s * 1e9) if wanted else 0
        coordinator.signal(PipelineSignal(step + 1, step, train_ns, round(rollout_s * 1e9),
                                          planned=wanted))
        until = time.monotonic() + plan.patience_s
        while coordinator.states()[0] is ReplicaState.REQUESTED and time.monotonic() < until:
            time.sleep(0.05)


def _samples(batch: Batch, group: int) -> list[dict[str, Any]]:
    """Returns the training data of a batch. A group whose trajectories all have the same reward has
    advantage 0 everywhere, but still counts in the mean."""
    told = []
    for at in range(0, len(batch.lives), group):
        ones = [live.trajectory for live in batch.lives[at : at + group]]
        told += [{"tokens": one.tokens, "learnt": one.learnt, "logprobs": one.logprobs,
                  "advantage": advantage}
                 for one, advantage in zip(ones, credits(ones), strict=True)]
    return told


_COUNTS = 5


def _counts(batch: Batch) -> list[float]:
    """Returns a batch's number of trajectories, its sums of rewards, right answers and turns, and
    its rollout time in seconds."""
    ones = [live.trajectory for live in batch.lives]
    return [len(ones), sum(one.reward for one in ones), sum(one.worths[-1] == 1 for one in ones),
            sum(one.turns for one in ones), batch.rollout_s]


class _Callbacks:
    """The callbacks of a replica member. The broker lends its GPU: the broker has parked the
    rollout
    service of that GPU before this process begins, and restores the service after its end."""

    def __init__(self, policy: Policy) -> None:
        self.gradient = policy.gradient

    def stop_rollouts(self) -> None:
        """Does nothing: no rollouts run in this process."""

    def start_rollouts(self) -> None:
        """Does nothing: no rollouts run in this process."""


def serve_member(access: str, number: int, incarnation: int, model: str, device: str) -> None:
    """Runs a replica for as long as it is lent, as an action that holds its GPU. The process id is
    written to `replica.pid` beside the access file."""
    Path(access).with_name("replica.pid").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    callbacks = _Callbacks(Policy(Path(model), device))
    Member(read_access(Path(access)), number, incarnation, callbacks).run()


def settle(request: Any, pause_s: float = 0.002) -> None:
    """Waits for an MPI request in sleeps: a rank that spins takes a core that actions could use."""
    while not request.Test():
        time.sleep(pause_s)


def main(path: Path) -> None:
    """Trains as the plan in this file says. Rank 0 writes the results to `out.json` beside it."""
    fields = json.loads(path.read_text())
    plan = RunPlan(**{**fields, "lend": tuple(fields["lend"])})
    if plan.device == "cpu":
        torch.set_num_threads(1)
    trainer = ReferenceTrainer(plan)
    steps = trainer.run()
    rank = tangram_hpc.comm.rank
    told = trainer.close()
    if rank == 0:
        (path.parent / "out.json").write_text(json.dumps({"steps": steps, **told}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
