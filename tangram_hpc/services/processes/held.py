"""Owns: which GPUs of a node somebody is busy with. Must not know with what.

Law: a block is taken whole or not at all, so nobody waits in a ring; among those who want the same
GPU the first that came is the first that gets it.
"""

from __future__ import annotations

import asyncio

Block = tuple[int, ...]


class Held:
    """Blocks that are taken, and who waits for one."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._line: list[tuple[Block, asyncio.Future[None]]] = []

    def try_take(self, block: Block) -> bool:
        """Takes a block if nobody has, or waits for, any GPU of it; says whether. O(waiting)."""
        if not self._free(block, len(self._line)):
            return False
        self._taken.update(block)
        return True

    async def take(self, block: Block) -> None:
        """Takes a block when its turn has come."""
        if self.try_take(block):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((block, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.remove((block, turn))
                self._next()
            else:
                self.give(block)  # it had just become ours
            raise

    def give(self, block: Block) -> None:
        """Frees a block that was taken."""
        self._taken.difference_update(block)
        self._next()

    def _free(self, block: Block, before: int) -> bool:
        return self._taken.isdisjoint(block) and all(
            set(other).isdisjoint(block) for other, _ in self._line[:before])

    def _next(self) -> None:
        n = 0
        while n < len(self._line):
            block, turn = self._line[n]
            if turn.cancelled() or not self._free(block, n):
                n += 1
                continue
            self._taken.update(block)
            del self._line[n]
            turn.set_result(None)
