"""Keeps the programs that were compiled for `/run_code`.

A reward function sends the same program once for each test case, with another input. So the first
request of a program compiles it, the others wait for that, and later ones find it here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .code_wire import CommandRunResult

BYTES_MAX = 256 << 20  # of all products that are kept
_RESULT_BYTES = 4096  # what a result counts besides its product


@dataclass(frozen=True)
class Compiled:
    """How the compilation of a program ended.

    Attributes:
        result: what the compiler said; None for a language without a compiler.
        product: the compiled program; empty if the compilation failed.
        keep: whether the same program would end so again.
    """

    result: CommandRunResult | None = None
    product: bytes = b""
    keep: bool = True


class CompiledPrograms:
    """The compiled programs by language and code, the least recently used ones dropped first. For
    one event loop."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Compiled]] = {}
        self._bytes, self._bytes_max = 0, bytes_max

    async def get(self, program: tuple[str, ...],
                  compile_it: Callable[[], Awaitable[Compiled]]) -> Compiled:
        """Returns a compiled program, and compiles it where nobody has.

        Args:
            program: its language, its code and whatever else decides how it is compiled.
            compile_it: compiles it. The compilation goes on when a caller gives up, because others
                may wait for the same program.

        Raises:
            whatever `compile_it` raises.
        """
        key = hashlib.sha256("\0".join(program).encode(errors="surrogatepass")).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._running:
            task = asyncio.ensure_future(self._compile(key, compile_it))
            self._running[key] = task
            task.add_done_callback(lambda done: self._over(key, done))
        return await asyncio.shield(self._running[key])

    async def _compile(self, key: bytes, compile_it: Callable[[], Awaitable[Compiled]]) -> Compiled:
        compiled = await compile_it()
        if compiled.keep:
            self._kept[key] = compiled
            self._bytes += _size(compiled)
            while self._bytes > self._bytes_max:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= _size(oldest)
        return compiled

    def _over(self, key: bytes, task: asyncio.Task[Compiled]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # every caller may have given up; asyncio would log it then


def _size(compiled: Compiled) -> int:
    result = compiled.result
    said = 0 if result is None else len(result.stdout or "") + len(result.stderr or "")
    return len(compiled.product) + said + _RESULT_BYTES
