"""One rank of the core trainer: train_steps in which replicas of the hybrid pool may help.

Each core deals the samples of a step among itself and its replicas. Replicas' gradients are added
to their core's own before the trainer reduces over its communicator. Samples whose gradient does
not arrive are computed by the core itself.

Invariants: the communicator that is handed in is used as it is and never changed, so its ranks
reduce among themselves, with or without replicas. Either all ranks of a core add a replica's
payload or none of them does. The sum is therefore that of plain gradient accumulation (up to
rounding), whatever happens to the replicas.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...app.system_clock import SystemClock
from ...domain.hybrid import AnyOrder, StepPlan
from ...errors import InvalidInput
from ...protocol.gradient_messages import pack_plan, unpack_plan
from ...storage.access import Access, mark_ended, write_access
from ..hybrid.hybrid_pool import HybridPool
from ..hybrid.hybrid_signal import PoolRules
from .coordinator import Coordinator
from .gradient_channel import GradientChannel, Vector

_PAUSE_S = 0.0005
_SLOT = 128  # bytes reserved for an address
_KEY = 32
Compute = Callable[[Vector, list[Any]], Vector]


class CoreTrainer:
    """One rank of the core trainer. All ranks create one at the same time and call `step` together.

    Args:
        comm: The core trainer's communicator (mpi4py), with `width` consecutive ranks for each
            data-parallel core.
        access: The file (mode 0600) in which rank 0 tells members where the coordinator listens.
        core_training, core_rollout, replicas: See `HybridPool`.
        rules: Thresholds and timeouts of the pool; default `PoolRules()`.
        host: The address of the interface on which the coordinator and the gradient channels
            listen; members must be able to reach it.
        patience_s: How long a step waits for a gradient after this rank has computed its own.
        silence_s: A member that sends nothing for this time is lost.
        on_kill, on_order: See `Coordinator`; used on rank 0.
        on_news: The old name of `on_order`, kept for one release.

    Raises:
        InvalidInput: The number of GPUs in `core_training` is not the communicator's size.
    """

    def __init__(self, comm: Any, access: str | Path, core_training: Sequence[Sequence[int]],
                 core_rollout: Sequence[int], replicas: Sequence[Sequence[int]], *,
                 rules: PoolRules | None = None, host: str = "127.0.0.1",
                 patience_s: float = 60.0, silence_s: float = 30.0,
                 on_kill: Callable[[int, int], None] = lambda member, incarnation: None,
                 on_order: Callable[[AnyOrder], None] = lambda order: None,
                 on_news: Callable[[AnyOrder], None] | None = None) -> None:
        width = len(core_training[0]) if core_training else 1
        if comm.size != len(core_training) * width:
            raise InvalidInput(f"core_training: {len(core_training)} cores of {width} GPUs do not "
                               f"match the communicator's {comm.size} ranks")
        self._comm, self._patience_s = comm, patience_s
        self._step = -1
        self._replicas = len(replicas)
        pool = HybridPool(rules or PoolRules(), core_training, core_rollout, replicas)
        drawn = bytearray(secrets.token_bytes(_KEY + 4) if comm.rank == 0 else _KEY + 4)
        comm.Bcast(drawn, root=0)
        key, job = bytes(drawn[:_KEY]), f"hybrid-{bytes(drawn[_KEY:]).hex()}"
        self.channel = GradientChannel(comm.rank // width, host, key, job)
        channels = _gathered(comm, self.channel.address)
        self.coordinator: Coordinator | None = None
        self._access, self._job = Path(access), job
        if comm.rank == 0:
            by_core = [channels[n : n + width] for n in range(0, comm.size, width)]
            self.coordinator = Coordinator(
                pool, SystemClock(), by_core, host, key, job, silence_s=silence_s,
                on_kill=on_kill, on_order=on_news or on_order)
            write_access(self._access, Access(job, (self.coordinator.address,), key, "", host,
                                              os.getpid()))

    @property
    def desk(self) -> Coordinator | None:
        """Old name of `coordinator`, kept for one release."""
        return self.coordinator

    @property
    def lane(self) -> GradientChannel:
        """Old name of `channel`, kept for one release."""
        return self.channel

    def step(self, step: int, version: int, params: Vector, samples: Sequence[Any],
             compute: Compute) -> tuple[Vector, StepPlan]:
        """Computes the gradients of this rank's samples, with the help of its replicas.

        The all-reduce over the core trainer and the optimizer's step stay with the caller.

        Args:
            step: Number of the train_step; each call has a larger number than the call before.
            version: Version of `params`; a gradient that was computed at another version is not
                added.
            params: The parameters as one contiguous vector of floats.
            samples: The samples of this rank, each a value that `protocol.value` can carry.
            compute: Returns the sum of some samples' gradients, with the shape and dtype of
                `params`.

        Returns:
            The sum of the gradients of all `samples`, and the plan that says which replicas
                counted.

        Raises:
            InvalidInput: `params` is not a contiguous vector of floats, or `step` is not above the
                last one.
        """
        if not params.flags.c_contiguous or params.ndim != 1 or params.dtype.kind != "f":
            raise InvalidInput("params: must be one contiguous vector of float numbers")
        if step <= self._step:  # checked on each rank, or the others would wait for ever
            raise InvalidInput(f"step: {step} must be above the last one ({self._step})")
        self._step = step
        plan = self._plan(step, version)
        todo = list(samples)
        (begin, end), theirs = self.channel.begin(plan, params, todo)
        total = compute(params, todo[begin:end]).copy()
        taken = self.channel.collect(self._patience_s)
        late = self._agree([n for n, (begin, end) in theirs.items()
                            if begin < end and n not in taken])
        for replica, (begin, end) in theirs.items():
            if replica in taken and not late[replica]:
                total += taken[replica]
            elif begin < end:
                total += compute(params, todo[begin:end])
        if self.coordinator is not None:
            for replica in (one.replica for one in plan.counting):
                if late[replica]:
                    self.coordinator.missed(replica, f"its gradient did not arrive in step {step}")
        return total, plan

    def close(self) -> None:
        """Closes coordinator and channels; members then serve rollouts again by themselves."""
        self.channel.close()
        if self.coordinator is not None:
            self.coordinator.close()
            mark_ended(self._access, self._job, time.strftime("%Y-%m-%dT%H:%M:%S"))

    # ---- among the core's ranks ----

    def _plan(self, step: int, version: int) -> StepPlan:
        data = b""
        if self.coordinator is not None:
            data = pack_plan(self.coordinator.begin(step, version))
        size = np.array([len(data)], dtype=np.int64)
        self._wait(self._comm.Ibcast(size, root=0))
        buffer = bytearray(data) if data else bytearray(int(size[0]))
        self._wait(self._comm.Ibcast(buffer, root=0))
        return unpack_plan(bytes(buffer))

    def _agree(self, missing: list[int]) -> NDArray[Any]:
        """Returns, for each replica, the number of ranks that lack its payload."""
        mine = np.zeros(self._replicas, dtype=np.int64)
        mine[missing] = 1
        everyone = np.zeros_like(mine)
        self._wait(self._comm.Iallreduce(mine, everyone))
        return everyone

    def _wait(self, request: Any) -> None:
        """Polls with short sleeps, so as not to spin on a CPU that rollouts could use."""
        while not request.Test():
            time.sleep(_PAUSE_S)


def _gathered(comm: Any, text: str) -> list[str]:
    """Returns the texts of all ranks, in rank order."""
    mine = text.encode().ljust(_SLOT, b"\0")
    told = bytearray(_SLOT * comm.size)
    comm.Allgather(bytearray(mine), told)
    return [bytes(told[at : at + _SLOT]).rstrip(b"\0").decode()
            for at in range(0, len(told), _SLOT)]
