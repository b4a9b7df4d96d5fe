"""Training's core: a step in which replicas of the hybrid pool may help.

Law: the communicator that is handed in is used as it is and never changed: its ranks reduce among
themselves, whoever helps. Replicas' gradients are added to their core's own before that. Either
all ranks of a core got a replica's payload, or none adds it; the samples of one that did not come
are computed here. So the sum is that of plain gradient accumulation, whatever happens to helpers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...app.clock import SystemClock
from ...domain.hybrid import AnyOrder, StepPlan
from ...errors import InvalidInput
from ...protocol.lane import pack_plan, unpack_plan
from ...storage.access import Access, mark_ended, write_access
from ..hybrid.hybrid_pool import HybridPool
from ..hybrid.hybrid_signal import PoolRules
from .coordinator import Coordinator
from .lane import Lane, Vector

_PAUSE_S = 0.0005
_SLOT = 128  # bytes of an address
_KEY = 32
Compute = Callable[[Vector, list[Any]], Vector]


class CoreTrainer:
    """One rank of the core. All ranks make one, at the same time, and call `step` together.

    Args:
        comm: the core's communicator (mpi4py), of `width` consecutive ranks for each data-parallel
            core.
        access: rank 0 writes there where members find the coordinator; a file of mode 0600.
        core_training, core_rollout, replicas: see `HybridPool`.
        host: the address of the interface on which coordinator and channels listen; members must
        reach it.
        patience_s: how long a step waits for a gradient after this rank has computed its own.
        on_kill, on_order: see `Coordinator`; on rank 0.
        on_news: the old name of `on_order`, kept for one release.
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
            raise InvalidInput(f"core_training: {len(core_training)} cores of {width} GPUs are not "
                               f"the communicator's {comm.size} ranks")
        self._comm, self._width, self._patience_s = comm, width, patience_s
        self._step = -1
        self._replicas = len(replicas)
        pool = HybridPool(rules or PoolRules(), core_training, core_rollout, replicas)
        drawn = bytearray(secrets.token_bytes(_KEY + 4) if comm.rank == 0 else _KEY + 4)
        comm.Bcast(drawn, root=0)
        key, job = bytes(drawn[:_KEY]), f"hybrid-{bytes(drawn[_KEY:]).hex()}"
        self.channel = Lane(comm.rank // width, host, key, job)
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
    def lane(self) -> Lane:
        """Old name of `channel`, kept for one release."""
        return self.channel

    def step(self, step: int, version: int, params: Vector, samples: Sequence[Any],
             compute: Compute) -> tuple[Vector, StepPlan]:
        """The sum of the gradients of this rank's samples, its replicas' among them, and who
        counted. The all-reduce over the core is the caller's, as is the step of the optimizer.

        Args:
            version: of `params`; what was computed at another one is not added.
            samples: of this rank, each a value that `protocol.value` can carry.
            compute: the sum of some samples' gradients, of `params`' shape and dtype.
        """
        if not params.flags.c_contiguous or params.ndim != 1 or params.dtype.kind != "f":
            raise InvalidInput("params: must be one contiguous vector of float numbers")
        if step <= self._step:  # on each rank, or the others would wait for ever
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
                    self.coordinator.missed(replica, f"no gradient of it came in step {step}")
        return total, plan

    def close(self) -> None:
        """Ends coordinator and channels; the members serve rollouts again by themselves."""
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

    def _agree(self, missing: list[int]) -> np.ndarray:
        """Of each replica, how many ranks miss its payload."""
        mine = np.zeros(self._replicas, dtype=np.int64)
        mine[missing] = 1
        everyone = np.zeros_like(mine)
        self._wait(self._comm.Iallreduce(mine, everyone))
        return everyone

    def _wait(self, request: Any) -> None:
        """Without spinning a CPU that rollouts could use."""
        while not request.Test():
            time.sleep(_PAUSE_S)


def _gathered(comm: Any, text: str) -> list[str]:
    """Every rank's word, in their order."""
    mine = text.encode().ljust(_SLOT, b"\0")
    told = bytearray(_SLOT * comm.size)
    comm.Allgather(bytearray(mine), told)
    return [bytes(told[at : at + _SLOT]).rstrip(b"\0").decode()
            for at in range(0, len(told), _SLOT)]
