"""Pure. A node's GPUs: which are free, and which service is resident on which aligned block.

Invariants: a service is resident on a whole aligned block, no GPU is in two blocks, and a busy
block is never evicted. A service stays on the block where it ran until another lease is given one
of its GPUs (lazy parking). Its next call finds it warm only on that very block.
"""

from __future__ import annotations

from typing import NamedTuple

from ...domain.service import BLOCK_SIZES
from .core_sets import CoreSet


class Resident(NamedTuple):
    """A service on its block.

    Attributes:
        service: its name.
        gpus: the GPUs of the block.
        used_at: when its last call there started, epoch ns.
        since: when its first call there started, epoch ns.
        left_at: when the block last came free after a call, epoch ns; 0 if it never did.
        tenant: the tenant of that call.
    """

    service: str
    gpus: tuple[int, ...]
    used_at: int
    since: int
    left_at: int = 0
    tenant: str = ""


class GpuSet(CoreSet):
    """The GPUs that a node lends, which of them are free, and the services that are resident on
    them.

    Attributes:
        blocks: for each size, the aligned blocks that the node lends as a whole, with their masks.
        resident: the resident service of each GPU that has one.
    """

    __slots__ = ("blocks", "resident")

    def __init__(self, units: tuple[int, ...]) -> None:
        super().__init__(units)
        lent = set(units)
        self.blocks = {
            size: [(block, self.mask(block))
                   for first in sorted(lent) if first % size == 0
                   if lent.issuperset(block := tuple(range(first, first + size)))]
            for size in BLOCK_SIZES
        }
        self.resident: dict[int, Resident] = {}

    def copy(self) -> GpuSet:
        """A copy to draw down while a placement is made. The tables of blocks are shared."""
        copied = object.__new__(GpuSet)
        copied.units, copied._position, copied._levels = self.units, self._position, self._levels
        copied.blocks = self.blocks
        copied.free_mask, copied.resident = self.free_mask, dict(self.resident)
        return copied

    def free_blocks(self, size: int) -> list[tuple[int, ...]]:
        """The aligned blocks of this size of which no GPU is lent."""
        free = self.free_mask
        return [block for block, mask in self.blocks[size] if mask & free == mask]

    def holds(self, service: str, block: tuple[int, ...]) -> bool:
        """Whether this service is resident on this very block."""
        there = self.resident.get(block[0])
        return there is not None and there.service == service and there.gpus == block

    def residents(self, block: tuple[int, ...]) -> list[Resident]:
        """The services that are resident on any GPU of a block, each once, in order of GPU."""
        found: dict[Resident, None] = {}
        for gpu in block:
            if gpu in self.resident:
                found[self.resident[gpu]] = None
        return list(found)

    def evict(self, block: tuple[int, ...]) -> None:
        """Parks the services that are resident on any GPU of a block."""
        for there in self.residents(block):
            for gpu in there.gpus:
                del self.resident[gpu]

    def settle(self, service: str, block: tuple[int, ...], now: int) -> None:
        """Makes a service resident on a block, and parks all services on blocks that overlap with
        it.
        """
        old = self.resident.get(block[0])
        same = old is not None and old.service == service and old.gpus == block
        self.evict(block)
        there = (old._replace(used_at=now) if old is not None and same
                 else Resident(service, block, now, now))
        for gpu in block:
            self.resident[gpu] = there

    def leave(self, block: tuple[int, ...], tenant: str, now: int) -> None:
        """Gives a block back, and notes that it was used by a call of this tenant until now."""
        self.give(block)
        there = self.resident.get(block[0]) if block else None
        if there is not None and there.gpus == block:
            left = there._replace(left_at=now, tenant=tenant)
            for gpu in block:
                self.resident[gpu] = left

    def clock_set(self, now: int) -> None:
        """Goes on at `now`, which may be earlier than before: no service came later than that."""
        self.resident = {
            gpu: there._replace(used_at=min(there.used_at, now), since=min(there.since, now),
                                left_at=min(there.left_at, now))
            for gpu, there in self.resident.items()}

    def choose(self, n: int, mask: int, preferred: tuple[int, ...] = ()
               ) -> tuple[tuple[int, ...], int]:
        """Chooses `n` GPUs out of `mask`, those without a resident service first. See
        `CoreSet.choose`.
        """
        bare = mask
        for gpu in self.resident:
            bare &= ~(1 << self._position[gpu])
        first, _ = super().choose(min(n, bare.bit_count()), bare, preferred)
        left = mask & ~self.mask(first)
        more, left = super().choose(n - len(first), left, preferred)
        return first + more, left

    def check(self) -> None:
        """Raises an AssertionError unless all resident services are on whole, disjoint, aligned
        blocks.
        """
        for gpu, there in self.resident.items():
            size = len(there.gpus)
            assert gpu in there.gpus and there.gpus[0] % size == 0, f"GPU {gpu}: {there}"
            assert size in BLOCK_SIZES, f"GPU {gpu}: {there}"
            assert all(self.resident.get(g) == there for g in there.gpus), f"GPU {gpu}: {there}"
