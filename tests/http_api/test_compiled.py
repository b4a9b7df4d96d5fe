"""Programs compiled for `/run_code` are compiled once, kept within a bound and forgotten in order.
"""

from __future__ import annotations

import asyncio

import pytest

from tangram_hpc.http_api.code_wire import CommandRunResult
from tangram_hpc.http_api.compiled import Compiled, CompiledPrograms

OK = CommandRunResult(status="Finished", return_code=0)


class Compiler:
    """Compiles by counting; each compilation takes one turn of the event loop."""

    def __init__(self, product: bytes = b"program", keep: bool = True) -> None:
        self.runs, self.product, self.keep = 0, product, keep
        self.go = asyncio.Event()

    async def __call__(self) -> Compiled:
        self.runs += 1
        await self.go.wait()
        return Compiled(OK, self.product, self.keep)


def test_requests_of_one_program_share_one_compilation() -> None:
    async def play() -> None:
        kept, compiler = CompiledPrograms(), Compiler()
        waiting = [asyncio.ensure_future(kept.get(("cpp", "x"), compiler)) for _ in range(50)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # who gives up does not take the others along
        await asyncio.sleep(0)
        compiler.go.set()
        products = [(await each).product for each in waiting[1:]]
        assert products == [b"program"] * 49 and compiler.runs == 1
        assert (await kept.get(("cpp", "x"), compiler)).product == b"program"
        assert compiler.runs == 1
        await kept.get(("cpp", "y"), compiler)
        await kept.get(("rust", "x"), compiler)
        assert compiler.runs == 3

    asyncio.run(play())


def test_what_might_end_otherwise_next_time_is_not_kept() -> None:
    async def play() -> None:
        kept, compiler = CompiledPrograms(), Compiler(keep=False)
        compiler.go.set()
        for _ in range(2):
            await kept.get(("cpp", "x"), compiler)
        assert compiler.runs == 2

    asyncio.run(play())


def test_the_least_recently_used_program_is_dropped_first() -> None:
    async def play() -> None:
        kept, compiler = CompiledPrograms(bytes_max=3 * 5000), Compiler(b"p" * 500)
        compiler.go.set()
        for code in "abca":  # the last one makes `a` the most recently used
            await kept.get(("cpp", code), compiler)
        assert compiler.runs == 3
        await kept.get(("cpp", "d"), compiler)
        await kept.get(("cpp", "a"), compiler)
        assert compiler.runs == 4
        await kept.get(("cpp", "b"), compiler)
        assert compiler.runs == 5

    asyncio.run(play())


def test_a_compilation_that_raises_reaches_its_callers_and_is_tried_again() -> None:
    async def fail() -> Compiled:
        raise RuntimeError("no node")

    async def play() -> None:
        kept, compiler = CompiledPrograms(), Compiler()
        compiler.go.set()
        with pytest.raises(RuntimeError):
            await kept.get(("cpp", "x"), fail)
        assert (await kept.get(("cpp", "x"), compiler)).product

    asyncio.run(play())


def test_what_a_compiler_said_counts_as_well() -> None:
    async def play() -> None:
        kept = CompiledPrograms(bytes_max=3 * 5000)
        loud = CommandRunResult(status="Finished", return_code=1, stderr="e" * 12_000)
        runs = 0

        async def fail() -> Compiled:
            nonlocal runs
            runs += 1
            return Compiled(loud)

        for code in "aba":
            await kept.get(("cpp", code), fail)
        assert runs == 3

    asyncio.run(play())
