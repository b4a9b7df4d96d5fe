"""Awaits an order to a copy for a limited time, after which the copy is killed.

Nothing else stops what a copy does: a kernel on a GPU, or a file system that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_WAIT_S = 1.0  # an order with a longer time limit is awaited in parts of this length
T = TypeVar("T")


async def within(work: Awaitable[T], limit_s: float | None, kill: Callable[[], None]) -> T:
    """Awaits an order; after `limit_s` seconds kills the copy, and raises TimeoutError when it has
    ended. `limit_s` of None sets no limit.
    """
    task = asyncio.ensure_future(work)
    try:
        left_s = limit_s
        while True:
            # each wait counts as planned: time in which the job was suspended does not count
            wait_s = None if left_s is None else min(left_s, _WAIT_S)
            done, _ = await asyncio.wait([task], timeout=wait_s)
            if done or left_s is None or left_s <= _WAIT_S:
                break
            left_s -= _WAIT_S
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    kill()
    await asyncio.wait([task])
    if task.cancelled() or task.exception() is not None:
        raise TimeoutError
    return task.result()  # the order was carried out at the same moment
