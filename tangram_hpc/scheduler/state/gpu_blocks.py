"""Pure. A node's GPUs: which are free, and which service stands on which aligned block.

Law: what stands on a GPU is a whole aligned block or nothing, and no GPU is in two blocks; a busy
block is never evicted. A service stays where it ran until somebody else is given one of its GPUs
(lazy parking), and is warm only for the very block it stands on.
"""

from __future__ import annotations

from typing import NamedTuple

from ...domain.service import BLOCK_SIZES
from .core_sets import CoreSet


class Resident(NamedTuple):
    """A service on its block; `used_at` is the start of its last call there, `since` that of its
    first."""

    service: str
    gpus: tuple[int, ...]
    used_at: int
    since: int


class GpuSet(CoreSet):
    """The GPUs a node lends, which of them are free, and what stands on them."""

    __slots__ = ("blocks", "resident")

    def __init__(self, units: tuple[int, ...]) -> None:
        super().__init__(units)
        lent = set(units)
        # size -> its aligned blocks that this node lends whole, each with its mask
        self.blocks = {
            size: [(block, self.mask(block))
                   for first in sorted(lent) if first % size == 0
                   if lent.issuperset(block := tuple(range(first, first + size)))]
            for size in BLOCK_SIZES
        }
        self.resident: dict[int, Resident] = {}

    def copy(self) -> GpuSet:
        """A copy to draw down; the tables of blocks are shared."""
        copied = object.__new__(GpuSet)
        copied.units, copied._position, copied._levels = self.units, self._position, self._levels
        copied.blocks = self.blocks
        copied.free_mask, copied.resident = self.free_mask, dict(self.resident)
        return copied

    def free_blocks(self, size: int) -> list[tuple[int, ...]]:
        """The aligned blocks of this size that nobody holds."""
        free = self.free_mask
        return [block for block, mask in self.blocks[size] if mask & free == mask]

    def holds(self, service: str, block: tuple[int, ...]) -> bool:
        """Whether this service stands on this very block."""
        there = self.resident.get(block[0])
        return there is not None and there.service == service and there.gpus == block

    def residents(self, block: tuple[int, ...]) -> list[Resident]:
        """What stands on any GPU of a block, each once, in order of GPU."""
        found: dict[Resident, None] = {}
        for gpu in block:
            if gpu in self.resident:
                found[self.resident[gpu]] = None
        return list(found)

    def evict(self, block: tuple[int, ...]) -> None:
        """Parks whatever stands on any GPU of a block."""
        for there in self.residents(block):
            for gpu in there.gpus:
                del self.resident[gpu]

    def settle(self, service: str, block: tuple[int, ...], now: int) -> None:
        """The service stands on this block from now on; what overlapped is parked."""
        old = self.resident.get(block[0])
        same = old is not None and old.service == service and old.gpus == block
        self.evict(block)
        there = Resident(service, block, now, old.since if old is not None and same else now)
        for gpu in block:
            self.resident[gpu] = there

    def choose(self, n: int, mask: int, preferred: tuple[int, ...] = ()
               ) -> tuple[tuple[int, ...], int]:
        """`n` GPUs out of `mask`, those on which nothing stands first."""
        bare = mask
        for gpu in self.resident:
            bare &= ~(1 << self._position[gpu])
        first, _ = super().choose(min(n, bare.bit_count()), bare, preferred)
        left = mask & ~self.mask(first)
        more, left = super().choose(n - len(first), left, preferred)
        return first + more, left

    def check(self) -> None:
        """Proves that what stands here are whole, disjoint, aligned blocks."""
        for gpu, there in self.resident.items():
            size = len(there.gpus)
            assert gpu in there.gpus and there.gpus[0] % size == 0, f"GPU {gpu}: {there}"
            assert size in BLOCK_SIZES, f"GPU {gpu}: {there}"
            assert all(self.resident.get(g) == there for g in there.gpus), f"GPU {gpu}: {there}"
