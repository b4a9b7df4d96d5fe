"""One copy of a service on a node: where it is, and what is known about it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ...ports import ServiceBackend
from .gpu_occupancy import Block


@dataclass(eq=False)
class ServiceCopy:
    """One copy of a service, loaded in this node's host memory.

    Attributes:
        service: the service's name.
        backend: what runs the model.
        mib: host memory that the copy takes, as `backend.load` reported it, MiB.
        block: the GPUs on which the copy is resident; () while it is parked.
        kept: the GPU whose memory still holds the weights of this parked copy; () for none.
        dead: whether the copy has died or was closed; such a copy is in no list any more.
        outdated: whether the service was declared otherwise since the copy was made.
        claimed: whether a caller was given this copy and is about to wake it.
        yield_due: whether the copy has been resident for its minimum residency while other blocks
            wait for it; the next caller that wants it on its present block must then queue too.
        since: when the copy became resident, monotonic ns; 0 before the first time.
        restore_ns: how long the last restore took in which weights were moved: freeing the block
            and waking the copy, ns.
        lock: held while the copy is called, woken or parked.
    """

    service: str
    backend: ServiceBackend
    mib: int = 0
    block: Block = ()
    kept: Block = ()
    dead: bool = False
    outdated: bool = False
    claimed: bool = False
    yield_due: bool = False
    since: int = 0
    restore_ns: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
