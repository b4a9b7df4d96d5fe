"""Bounds the memory of uploads of files, which are kept whole until they are written.

`BODIES` counts the bodies of uploads as they come, and `unpacking.UPLOADS` the contents of
compressed ones. An upload that does not fit waits for those before it, and is refused after
`WAIT_S`; its client may try again. A body is counted before it is read, so a client whose upload
waits does not send it yet. Copies that are made while a content is sent are not counted.

A body and an unpacked content are counted apart: an upload holds its body while it waits for the
memory of its content, and with one count two such uploads could wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping

from starlette.types import Scope

from .sandboxes import Sandbox
from .wire_errors import ApiError

TOGETHER_MAX = 1 << 30  # bytes of all uploads at a time
WAIT_S = 10.0


class UploadMemory:
    """How many bytes uploads may hold at a time; for one event loop.

    Args:
        most: the bytes of all uploads together.
        wait_s: how long an upload waits for those before it, in seconds.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        self._left, self._wait_s = most, wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Holds `size` bytes within the context, after all who asked before have got theirs.

        Raises:
            ApiError: they are not free in time; the client may try again.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await asyncio.wait([turn], timeout=self._wait_s)
            if not turn.done():
                raise ApiError(503, f"other uploads hold the memory for the {size} bytes of this "
                                    "one; try again", retry_after_s=1)
            yield
        finally:
            if turn.done():
                self._left += size
            else:
                self._waiting.remove((size, turn))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            size, turn = self._waiting.popleft()
            self._left -= size
            turn.set_result(None)


BODIES = UploadMemory(TOGETHER_MAX, WAIT_S)


@contextlib.asynccontextmanager
async def body_held(sandbox: Sandbox, scope: Scope, headers: Mapping[str, str], body_max: int
                    ) -> AsyncIterator[None]:
    """Holds memory for the body of a request within the context if the request uploads files.
    Nothing is held for a body that is known to be too large, as it is not kept.

    Args:
        sandbox: the sandbox that the request is for.
        scope: the ASGI scope of the request.
        headers: the request's headers, with lower-case names.
        body_max: the most bytes of a body; so many are held for a body that does not tell its size.

    Raises:
        ApiError: the memory is not free in time; the client may try again.
    """
    length = headers.get("content-length", "")
    size = int(length) if length.isdigit() else body_max
    if scope["method"] != "POST" or scope["path"] != "/files" or size > body_max:
        yield
        return
    await sandbox.processes.make_room()  # nobody shall hold bytes until the end of a terminal
    async with BODIES.held(size):
        yield
