"""Which parked copies of a node still have their weights in the memory of a GPU.

A copy that leaves a GPU need not free the GPU's memory as long as nobody needs it: when it comes
back to that GPU, nothing has to be copied. The weights that were used longest ago are dropped first
(LRU). This module chooses; `node_copies.py` moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .gpu_occupancy import Block
from .service_copy import ServiceCopy


@dataclass
class DeviceCache:
    """The parked copies that still have their weights on a GPU.

    Attributes:
        mib: how much of each GPU's memory weights may take, those of the resident copy included,
            MiB; with 0 nothing is kept.
        kept: the copies, the least recently used first.
    """

    mib: int = 0
    kept: list[ServiceCopy] = field(default_factory=list)

    def takes(self, copy: ServiceCopy) -> bool:
        """Returns whether the weights of a copy may stay on its block; only one GPU is kept."""
        return copy.backend.shares_gpu and copy.mib <= self.mib and len(copy.block) == 1

    def keep(self, copy: ServiceCopy) -> None:
        """Notes that the weights of a copy stay on the block that it leaves."""
        copy.kept = copy.block
        self.kept.append(copy)

    def forget(self, copy: ServiceCopy) -> None:
        """Takes a copy out: its weights are in use again, or no longer on the GPU."""
        if copy.kept:
            copy.kept = ()
            self.kept.remove(copy)

    def kept_on(self, block: Block) -> list[ServiceCopy]:
        """Returns the copies that are kept on any GPU of a block. O(copies), as `excess`."""
        return [copy for copy in self.kept if not set(copy.kept).isdisjoint(block)]

    def excess(self, coming: ServiceCopy, block: Block) -> list[ServiceCopy]:
        """Returns the copies to drop before another one comes to a block."""
        found = self.kept_on(block)
        if not coming.backend.shares_gpu:
            return found
        total = sum(copy.mib for copy in [coming, *found])
        dropped = []
        for copy in found:
            if total <= self.mib:
                break
            dropped.append(copy)
            total -= copy.mib
        return dropped
