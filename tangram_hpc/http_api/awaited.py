"""Does the work of a request for as long as its client waits for the answer.

A client that closes its connection needs no answer any more. What was begun for it is cancelled
then, so that it takes no cores and no memory from others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")


class GivenUp(Exception):
    """Raised when the client hung up, or the time was over, before the work was done."""


async def awaited(work: Awaitable[T], gone: Callable[[], Awaitable[object]],
                  limit_s: float | None = None) -> T:
    """Returns what the work returns. Otherwise cancels the work and waits for its end, which may
    still be a result that nobody gets: a caller whose work makes something has to remove it.

    Args:
        work: what is done for the client.
        gone: returns when the client has hung up.
        limit_s: how long the work may take, in seconds; None for no limit.

    Raises:
        GivenUp: the client has hung up, or the time is over.
    """
    doing, hung_up = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((doing, hung_up), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if hung_up.done() or not doing.done():
            raise GivenUp
        return doing.result()
    finally:
        for task in (doing, hung_up):
            task.cancel()
        await asyncio.gather(doing, hung_up, return_exceptions=True)


async def hung_up(http: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
