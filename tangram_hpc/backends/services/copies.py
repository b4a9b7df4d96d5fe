"""Owns: the copies of a node's services - which exist, where each stands, and how one is brought to
a block of GPUs and parked. Must not know of leases or calls.

Law: a copy is loaded once and lives until it dies; it stands on one block or is parked. On a GPU
stands one copy at most. Who brings a copy to a block holds that block's lock, so nobody else moves
anything there. Copies of one service beyond its first are loaded when a call needs one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from ...domain.service import ServiceSpec
from ...ports import OutOfDeviceMemory, ServiceBackend, ServiceDied, ServiceRefused

Block = tuple[int, ...]
LOADS = 2  # copies that are loaded at once
DEATHS = 3  # while loading, in a row: then its service is refused

Make = Callable[[ServiceSpec, int], ServiceBackend]  # of a service, its copy of this number


@dataclass(eq=False)
class Copy:
    """One copy. `block` is () while it is parked; `users` want it where it is."""

    service: str
    backend: ServiceBackend
    block: Block = ()
    dead: bool = False
    taken: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Copies:
    """All copies of a node.

    Args:
        make: makes a backend that is not loaded yet.
        gpus: what this node lends.
    """

    def __init__(self, make: Make, gpus: Block) -> None:
        self._make = make
        self._gpus = gpus
        self._locks = {gpu: asyncio.Lock() for gpu in gpus}
        self._loads = asyncio.Semaphore(LOADS)
        self._specs: dict[str, ServiceSpec] = {}
        self._copies: dict[str, list[Copy]] = {}
        self._refused: dict[str, str] = {}
        self._numbers = 0
        self._loading: dict[str, asyncio.Task[None]] = {}

    def prepare(self, spec: ServiceSpec) -> None:
        """A service may be called from now on: its first copy is loaded and parked meanwhile."""
        if spec.name not in self._specs:
            self._specs[spec.name] = spec
            self._copies[spec.name] = []
            self._load_first(spec.name)

    def spec(self, service: str) -> ServiceSpec | None:
        """The service, if it was prepared."""
        return self._specs.get(service)

    @asynccontextmanager
    async def on(self, service: str, block: Block) -> AsyncIterator[tuple[Copy, int]]:
        """A copy that stands on this block, and the ns that bringing it there took (0: it stood
        there); nobody else moves anything on the block meanwhile.

        Raises:
            ServiceRefused: the service can never be served here.
            ServiceDied: the copy died on its way.
            OutOfDeviceMemory: it does not fit.
        """
        async with AsyncExitStack() as stack:
            for gpu in block:  # ascending, so nobody waits in a ring
                await stack.enter_async_context(self._locks[gpu])
            copy = self._standing(service, block)
            took = 0
            if copy is None:
                began = time.monotonic_ns()
                copy = await self._bring(service, block)
                took = max(1, time.monotonic_ns() - began)
            await stack.enter_async_context(copy.lock)
            try:
                yield copy, took
            except ServiceDied:
                await self._bury(copy)
                raise

    def kill(self) -> None:
        """Ends all of them at once; `close` is to follow."""
        for task in self._loading.values():
            task.cancel()
        for copy in self._everyone():
            copy.backend.kill()

    async def close(self) -> None:
        """Waits until all of them are gone and nothing of them is left."""
        self.kill()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        for copy in self._everyone():
            await self._bury(copy)

    def _everyone(self) -> list[Copy]:
        return [copy for copies in self._copies.values() for copy in copies]

    # ---- standing where ----

    def _standing(self, service: str, block: Block) -> Copy | None:
        for copy in self._copies.get(service, ()):
            if copy.block == block and not copy.dead:
                return copy
        return None

    async def _bring(self, service: str, block: Block) -> Copy:
        """Parks what overlaps, then wakes a copy there."""
        over = [c for c in self._everyone() if not set(c.block).isdisjoint(block)]
        await asyncio.gather(*(self._park(c) for c in over))
        copy = await self._free_copy(service)
        try:
            async with copy.lock:
                await copy.backend.wake(block)
                copy.block = block
        except ServiceDied:
            await self._bury(copy)
            raise
        finally:
            copy.taken = False
        return copy

    async def _park(self, copy: Copy) -> None:
        async with copy.lock:
            if not copy.block or copy.dead:
                return  # somebody else did
            try:
                await copy.backend.park()
            except ServiceDied:
                await self._bury(copy)
            copy.block = ()

    async def _free_copy(self, service: str) -> Copy:
        """A parked copy that is this caller's to wake; another one is loaded where all stand."""
        while True:
            if service in self._refused:
                raise ServiceRefused(self._refused[service])
            copies = self._copies[service]
            for copy in copies:
                if not copy.block and not copy.taken:
                    copy.taken = True
                    return copy
            if service not in self._loading:
                self._load_first(service)
            await asyncio.shield(self._loading[service])

    # ---- loading and dying ----

    def _load_first(self, service: str) -> None:
        task = self._loading[service] = asyncio.ensure_future(self._load(service))
        task.add_done_callback(_check)

    async def _load(self, service: str) -> None:
        try:
            self._copies[service].append(await self._loaded(service))
        except ServiceRefused as error:
            self._refused[service] = str(error)
        finally:  # not in a callback: who looks before that would wait for what is over
            del self._loading[service]

    async def _loaded(self, service: str) -> Copy:
        async with self._loads:
            for attempt in range(1, DEATHS + 1):
                self._numbers += 1
                backend = self._make(self._specs[service], self._numbers)
                try:
                    await backend.load()
                except ServiceDied as error:
                    with suppress(ServiceDied):
                        await backend.close()
                    if attempt == DEATHS:
                        raise ServiceRefused(f"service {service}: it dies while it is loaded: "
                                             f"{error}") from None
                    continue
                except BaseException:
                    backend.kill()
                    with suppress(ServiceDied):
                        await backend.close()
                    raise
                return Copy(service, backend)
        raise AssertionError("unreachable")

    async def _bury(self, copy: Copy) -> None:
        if not copy.dead:
            copy.dead, copy.block = True, ()
            self._copies[copy.service].remove(copy)
            with suppress(ServiceDied, OutOfDeviceMemory):
                await copy.backend.close()



def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # a broken law must be heard
