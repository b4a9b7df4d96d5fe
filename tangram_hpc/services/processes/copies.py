"""Owns: the copies of a node's services - which exist, where each stands, and how one is brought to
a block of GPUs and parked. Must not know of leases or calls.

Law: a copy is loaded once and lives until it dies; it stands on one block or is parked. On a GPU
stands one copy at most. Who brings a copy to a block has taken that block, so nobody else moves
anything there. Copies of one service beyond its first are loaded when more blocks want it than
there are, as far as the node's memory goes; nobody waits for that while one that lives can serve:
those that want one take turns, each for so long that moving it is a small part of its time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from ...domain.service import ServiceSpec
from ...ports import OutOfDeviceMemory, ServiceBackend, ServiceDied, ServiceRefused
from .held import Block, Held

LOADS = 2  # copies that are loaded at once
DEATHS = 3  # while loading, in a row: then its service is refused
KEEPS = 4  # a block keeps a copy that others wait for as long as so many restores take

Make = Callable[[ServiceSpec, int], ServiceBackend]  # of a service, its copy of this number


@dataclass(eq=False)
class Copy:
    """One copy. `block` is () while it is parked; `taken`: somebody is about to wake it; `owed`: it
    has been on its block, since `since` (monotonic ns), for long enough, and others wait for it."""

    service: str
    backend: ServiceBackend
    mib: int = 0
    block: Block = ()
    dead: bool = False
    taken: bool = False
    owed: bool = False
    since: int = 0
    restore_ns: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Copies:
    """All copies of a node.

    Args:
        make: makes a backend that is not loaded yet.
        mem_mib: memory that all copies may take; 0: any. Each service has one in any case.
    """

    def __init__(self, make: Make, mem_mib: int = 0) -> None:
        self._make, self._mem_mib = make, mem_mib
        self._held = Held()
        self._loads = asyncio.Semaphore(LOADS)
        self._specs: dict[str, ServiceSpec] = {}
        self._ahead: dict[str, int] = {}  # copies that are loaded before they are wanted
        self._copies: dict[str, list[Copy]] = {}
        self._refused: dict[str, str] = {}
        self._numbers = 0
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._enough: set[str] = set()  # services of which another copy could not be loaded
        self._lines: dict[str, list[object]] = {}  # who waits for a copy, first come first served
        self._change = asyncio.Event()  # something that they wait for

    def prepare(self, spec: ServiceSpec, copies: int = 1) -> None:
        """A service may be called from now on: its first copies are loaded and parked meanwhile,
        those of each other service before its second."""
        if spec.name not in self._specs:
            self._specs[spec.name], self._ahead[spec.name] = spec, copies
            self._copies[spec.name], self._lines[spec.name] = [], []
            self._load_another(spec.name)

    def spec(self, service: str) -> ServiceSpec | None:
        """The service, if it was prepared."""
        return self._specs.get(service)

    @asynccontextmanager
    async def on(self, service: str, block: Block) -> AsyncIterator[tuple[Copy, int]]:
        """A copy that stands on this block, and the ns that bringing it there took (0: it stood
        there; waiting for a copy never counts); nobody else moves anything there meanwhile.

        Raises:
            ServiceRefused: the service can never be served here.
            ServiceDied: the copy died on its way.
            OutOfDeviceMemory: it does not fit.
        """
        await self._held.take(block)
        try:
            copy, took = self._standing(service, block), 0
            if copy is None:
                copy = await self._bring(service, block)
                took = copy.restore_ns
            async with copy.lock:
                try:
                    yield copy, took
                except ServiceDied:
                    await self._bury(copy)
                    raise
                finally:
                    kept = time.monotonic_ns() - copy.since
                    copy.owed = bool(self._lines[service]) and kept >= KEEPS * copy.restore_ns
        finally:
            self._held.give(block)
            self._changed()

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
            if copy.block == block and not copy.dead and not (copy.owed and self._lines[service]):
                return copy
        return None

    async def _bring(self, service: str, block: Block) -> Copy:
        """Parks what overlaps, then wakes a copy there."""
        began = time.monotonic_ns()
        over = [c for c in self._everyone() if not set(c.block).isdisjoint(block)]
        await asyncio.gather(*(self._park(c) for c in over))
        took = time.monotonic_ns() - began
        copy = await self._free_copy(service)
        began = time.monotonic_ns()
        try:
            async with copy.lock:
                await copy.backend.wake(block)
                copy.block, copy.since = block, time.monotonic_ns()
                copy.restore_ns = max(1, took + copy.since - began)
        except ServiceDied:
            await self._bury(copy)
            raise
        finally:
            copy.taken = copy.owed = False
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
        self._changed()

    async def _free_copy(self, service: str) -> Copy:
        """A parked copy that is this caller's to wake: the first that there is, be it loaded, or
        parked from where nobody uses it."""
        ticket, line = object(), self._lines[service]
        line.append(ticket)
        try:
            while True:
                change = self._change  # what happens while we look must not be missed
                if service in self._refused:
                    raise ServiceRefused(self._refused[service])
                if line[0] is ticket and (copy := await self._unused(service)) is not None:
                    return copy
                if self._may_load(service):
                    self._load_another(service)
                await change.wait()
        finally:
            line.remove(ticket)
            self._changed()

    async def _unused(self, service: str) -> Copy | None:
        free = [c for c in self._copies[service] if not c.taken and not c.dead]
        for copy in sorted(free, key=lambda c: c.block):  # those that are parked first
            if not copy.block:
                copy.taken = True
                return copy
            block = copy.block
            if self._held.try_take(block):
                copy.taken = True
                try:
                    await self._park(copy)
                finally:
                    self._held.give(block)
                if not copy.dead:
                    return copy
        return None

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    # ---- loading and dying ----

    def _may_load(self, service: str) -> bool:
        own = self._copies[service]
        if service in self._loading or (own and service in self._enough):
            return False
        if not own or not self._mem_mib:
            return True
        loading = [self._copies[name][0] for name in self._loading if self._copies[name]]
        taken = sum(copy.mib for copy in [*self._everyone(), *loading])  # as large as its first
        return own[0].mib + taken <= self._mem_mib

    def _load_another(self, service: str) -> None:
        task = self._loading[service] = asyncio.ensure_future(self._load(service))
        task.add_done_callback(_check)

    async def _load(self, service: str) -> None:
        own = self._copies[service]
        try:
            own.append(await self._loaded(service))
        except ServiceRefused as error:
            if own:
                self._enough.add(service)
            else:
                self._refused[service] = str(error)
        finally:  # not in a callback: who looks before that would wait for what is over
            del self._loading[service]
            self._changed()
        if 0 < len(own) < self._ahead[service] and self._may_load(service):
            self._load_another(service)

    async def _loaded(self, service: str) -> Copy:
        async with self._loads:
            for attempt in range(1, DEATHS + 1):
                self._numbers += 1
                backend = self._make(self._specs[service], self._numbers)
                try:
                    mib = await backend.load()
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
                return Copy(service, backend, mib)
        raise AssertionError("unreachable")

    async def _bury(self, copy: Copy) -> None:
        if not copy.dead:
            copy.dead, copy.block = True, ()
            self._copies[copy.service].remove(copy)
            with suppress(ServiceDied, OutOfDeviceMemory):
                await copy.backend.close()
            self._changed()


def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # a broken law must be heard
