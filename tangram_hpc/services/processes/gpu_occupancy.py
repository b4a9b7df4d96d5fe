"""Which GPUs of a node are in use, and who waits for which.

A caller asks for a whole block and gets all of its GPUs or none, so no two callers can wait for
each other. Among callers that want the same GPU, the first to ask is the first to get it. This
module does not know what a block is used for.
"""

from __future__ import annotations

import asyncio

Block = tuple[int, ...]


class GpuOccupancy:
    """The occupied GPUs, and the queue of callers that wait for a block."""

    def __init__(self) -> None:
        self._occupied: set[int] = set()
        self._queue: list[tuple[Block, asyncio.Future[None]]] = []

    def try_take(self, block: Block) -> bool:
        """Occupies a block if nobody uses or waits for any GPU of it; returns whether it did.

        O(waiting callers).
        """
        if not self._free(block, len(self._queue)):
            return False
        self._occupied.update(block)
        return True

    async def take(self, block: Block) -> None:
        """Occupies a block, after all earlier callers that want one of its GPUs."""
        if self.try_take(block):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((block, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.remove((block, turn))
                self._next()
            else:
                self.give(block)  # it became ours just before we were cancelled
            raise

    def give(self, block: Block) -> None:
        """Frees an occupied block."""
        self._occupied.difference_update(block)
        self._next()

    def _free(self, block: Block, before: int) -> bool:
        return self._occupied.isdisjoint(block) and all(
            set(other).isdisjoint(block) for other, _ in self._queue[:before])

    def _next(self) -> None:
        n = 0
        while n < len(self._queue):
            block, turn = self._queue[n]
            if turn.cancelled() or not self._free(block, n):
                n += 1
                continue
            self._occupied.update(block)
            del self._queue[n]
            turn.set_result(None)
