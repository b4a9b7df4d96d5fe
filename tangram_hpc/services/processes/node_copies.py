"""The service copies of one node: which exist, where each is, and how one gets to its GPUs.

A service copy is one loaded instance of a model. It is loaded once, into host memory, and is then
either parked there or resident on one block of GPUs. Before calls can run on a block, `on` parks
whatever overlaps that block and wakes a copy there. The weights of a parked copy stay in the GPU's
memory until that memory is needed (`device_cache.py`); then the copy need not be woken.

A second copy of a service is loaded when more blocks want the service than copies exist and the
node's memory suffices. Nobody waits for that load while a copy that exists can serve: those that
want a copy take turns, and each keeps it for `KEEPS` restore times, so that moving the copy takes a
small part of the time.

Invariants: a GPU has at most one resident copy. A copy becomes resident on a block, and leaves it,
only by the caller that occupies the block. Weights that are kept on a GPU may be dropped by others
too, under the lock of their copy. This module knows nothing of leases or calls;
`service_executor.py` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress

from ...domain.service import ServiceSpec
from ...ports import OutOfDeviceMemory, ServiceBackend, ServiceDied, ServiceRefused
from ...unawaited import raise_failure
from .device_cache import DeviceCache
from .gpu_occupancy import Block, GpuOccupancy
from .service_copy import ServiceCopy

LOADS = 2  # copies that may be loading at the same time, where loading is work of this node
DEATHS = 3  # a service is refused after so many copies in a row died while loading
REFUSED_S = 10.0  # how long a service is refused; then the next call loads it again
KEEPS = 4  # minimum residency while others wait for the copy, in restore times of this copy

# makes a backend that is not loaded yet, for a service and the number of the copy
Make = Callable[[ServiceSpec, int], ServiceBackend]


class NodeCopies:
    """All service copies of a node.

    Args:
        make: makes a backend that is not loaded yet.
        mem_mib: host memory that all copies together may take, MiB; 0 for no limit. The first copy
            of each service is loaded whatever the limit says.
        cache_mib: memory of each GPU that weights may take while copies are parked, MiB.
    """

    def __init__(self, make: Make, mem_mib: int = 0, cache_mib: int = 0) -> None:
        self._make, self._mem_mib = make, mem_mib
        self._occupancy, self._cache = GpuOccupancy(), DeviceCache(cache_mib)
        self._loads = asyncio.Semaphore(LOADS)
        self._specs: dict[str, ServiceSpec] = {}
        self._preload: dict[str, int] = {}  # copies to load before any call asks for them
        self._copies: dict[str, list[ServiceCopy]] = {}
        # why a service is refused, and the monotonic time until which it is
        self._refused: dict[str, tuple[str, float]] = {}
        self._numbers = 0  # the number of the copy that was made last
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._no_more: set[str] = set()  # services whose further copy was refused
        self._waiting: dict[str, list[object]] = {}  # callers that wait for a copy, FCFS
        self._change = asyncio.Event()  # set and replaced when waiting callers should check again

    def prepare(self, spec: ServiceSpec, copies: int = 1) -> None:
        """Makes a service known, and begins to load and park its first `copies` copies.

        At most `LOADS` copies are loading at a time, first come first served; those of servers that
        somebody else runs do not count. A service asks for its second copy only after its first is
        loaded, so services that are prepared together get their first copies first.

        A known service may come with other options, from a broker that was started again with other
        settings. Its copies are then outdated: they run no further batch, and are closed when a
        call next needs a copy. One that is being loaded is given up.
        """
        old = self._specs.get(spec.name)
        if old is not None and (old.backend, old.options) == (spec.backend, spec.options):
            return
        self._specs[spec.name], self._preload[spec.name] = spec, copies
        if old is None:
            self._copies[spec.name], self._waiting[spec.name] = [], []
            self._load_another(spec.name)
            return
        for copy in self._copies[spec.name]:
            copy.outdated = True
        if (loading := self._loading.get(spec.name)) is not None:
            loading.cancel()
        self._refused.pop(spec.name, None)
        self._no_more.discard(spec.name)

    def spec(self, service: str) -> ServiceSpec | None:
        """Returns the service of this name, or None if it was not prepared."""
        return self._specs.get(service)

    @asynccontextmanager
    async def on(self, service: str, block: Block) -> AsyncIterator[tuple[ServiceCopy, int]]:
        """Reserves a block and yields a copy of the service that is resident there.

        Nobody else moves a copy to or from the block while the context is open.

        Yields:
            The copy, and how long it took to bring it there in ns: 0 if it was resident already.
            The wait for a free copy is not counted.

        Raises:
            ServiceRefused: this node cannot serve the service, or not now as its copies died while
                they were loaded.
            ServiceDied: the copy died while it was brought there.
            OutOfDeviceMemory: the copy does not fit on the block.
        """
        await self._occupancy.take(block)
        try:
            copy, took = self._resident(service, block), 0
            if copy is None:
                copy, took = await self._bring(service, block)
            async with copy.lock:
                try:
                    yield copy, took
                except ServiceDied:
                    await self._remove(copy)
                    raise
                finally:
                    kept = time.monotonic_ns() - copy.since
                    copy.yield_due = (bool(self._waiting[service])
                                      and kept >= KEEPS * copy.restore_ns)
        finally:
            self._occupancy.give(block)
            self._changed()

    def occupies(self, block: Block) -> bool:
        """Returns whether any copy is resident or kept on a GPU of a block. O(copies)."""
        return bool(self._resident_on(block) or self._cache.kept_on(block))

    async def vacate(self, block: Block) -> None:
        """Frees the memory of a block for somebody who is no service: parks what is resident there
        and drops what is kept there.
        """
        await self._occupancy.take(block)
        try:
            await asyncio.gather(*(self._park(c) for c in self._resident_on(block)))
            await self.drop_kept(block)
        finally:
            self._occupancy.give(block)
            self._changed()

    async def drop_kept(self, block: Block) -> bool:
        """Drops the weights that are kept on a block, which the caller occupies; returns whether
        there were any.
        """
        found = self._cache.kept_on(block)
        await asyncio.gather(*(self._drop(copy) for copy in found))
        return bool(found)

    def kill(self) -> None:
        """Kills all copies at once; call `close` afterwards to wait for their end."""
        for task in self._loading.values():
            task.cancel()
        for copy in self._all():
            copy.backend.kill()

    async def close(self) -> None:
        """Kills all copies and returns when nothing of them is left."""
        self.kill()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        for copy in self._all():
            await self._remove(copy)

    def _all(self) -> list[ServiceCopy]:
        return [copy for copies in self._copies.values() for copy in copies]

    def _resident_on(self, block: Block) -> list[ServiceCopy]:
        return [copy for copy in self._all() if not set(copy.block).isdisjoint(block)]

    # ---- residency ----

    def _resident(self, service: str, block: Block) -> ServiceCopy | None:
        for copy in self._copies.get(service, ()):
            yields = copy.yield_due and self._waiting[service]
            if copy.block == block and not (copy.dead or copy.outdated or yields):
                return copy
        return None

    async def _bring(self, service: str, block: Block) -> tuple[ServiceCopy, int]:
        """Parks what overlaps the block, then wakes a copy there; returns it, and how long that
        took, ns.
        """
        began = time.monotonic_ns()
        await asyncio.gather(*(self._leave(c) for c in self._resident_on(block)))
        took = time.monotonic_ns() - began
        copy = await self._free_copy(service, block)
        began = time.monotonic_ns()
        try:
            if copy.kept != block:
                await self._make_room(copy, block)
            async with copy.lock:
                if copy.dead:
                    raise ServiceDied("it ended while it left another GPU")
                if kept := copy.kept:
                    await copy.backend.stand_by()  # raises if the copy died meanwhile
                    self._cache.forget(copy)
                else:
                    await self._wake(copy, block)
                copy.block, copy.since = block, time.monotonic_ns()
                took = max(1, took + copy.since - began)
                if not kept:
                    copy.restore_ns = took
        except ServiceDied:
            await self._remove(copy)
            raise
        finally:
            copy.claimed = copy.yield_due = False
        return copy, took

    async def _make_room(self, copy: ServiceCopy, block: Block) -> None:
        """Drops what would leave too little memory on the block, and what the copy itself still
        has on another GPU.
        """
        dropped = self._cache.excess(copy, block)
        await asyncio.gather(*(self._drop(each) for each in [*dropped, copy]))

    async def _wake(self, copy: ServiceCopy, block: Block) -> None:
        try:
            await copy.backend.wake(block)
        except OutOfDeviceMemory:
            # other programs may have less memory left than the cache was told that it has
            if not await self.drop_kept(block):
                raise
            await copy.backend.wake(block)

    async def _leave(self, copy: ServiceCopy) -> None:
        """Takes a copy off its block; its weights stay there if they may."""
        async with copy.lock:
            if not copy.block or copy.dead:
                return  # another caller did it while this one waited for the lock
            try:
                if self._cache.takes(copy):
                    await copy.backend.stand_by()
                    self._cache.keep(copy)
                else:
                    await copy.backend.park()
            except ServiceDied:
                await self._remove(copy)
            copy.block = ()
        self._changed()

    async def _park(self, copy: ServiceCopy) -> None:
        """Takes a copy off its block and frees its memory there."""
        async with copy.lock:
            if not copy.block or copy.dead:
                return  # another caller did it while this one waited for the lock
            await self._free_memory(copy)
            copy.block = ()
        self._changed()

    async def _drop(self, copy: ServiceCopy) -> None:
        """Frees the memory where the weights of a parked copy are kept, if they are."""
        async with copy.lock:
            if copy.kept and not copy.dead:
                await self._free_memory(copy)
                self._cache.forget(copy)

    async def _free_memory(self, copy: ServiceCopy) -> None:
        try:
            await copy.backend.park()
        except ServiceDied:
            await self._remove(copy)

    async def _free_copy(self, service: str, block: Block) -> ServiceCopy:
        """Waits in line for a copy of the service, and returns it parked and claimed. A copy whose
        weights are kept on the block comes first.

        The copy may be newly loaded, parked already, or parked now from a block that nobody uses.
        """
        ticket, queue = object(), self._waiting[service]
        queue.append(ticket)
        try:
            while True:
                # read before the checks, so that no change during the checks is missed
                change = self._change
                self._check_refused(service)
                if queue[0] is ticket and (copy := await self._unused(service, block)) is not None:
                    return copy
                if self._may_load(service):
                    self._load_another(service)
                await change.wait()
        finally:
            queue.remove(ticket)
            self._changed()

    def _check_refused(self, service: str) -> None:
        """Raises ServiceRefused while the service is refused."""
        why, until = self._refused.get(service, ("", 0.0))
        if time.monotonic() < until:
            raise ServiceRefused(why)
        self._refused.pop(service, None)

    async def _unused(self, service: str, block: Block) -> ServiceCopy | None:
        free = [c for c in self._copies[service] if not c.claimed and not c.dead]
        # outdated copies first, as they only make room; then parked copies before resident ones,
        # and a copy that is kept elsewhere last among them
        for copy in sorted(free, key=lambda c: (not c.outdated, c.block, c.kept != block, c.kept)):
            there = copy.block
            if there:
                if not self._occupancy.try_take(there):
                    continue
                copy.claimed = True
                try:
                    await self._park(copy)
                finally:
                    self._occupancy.give(there)
            copy.claimed = True
            if copy.outdated:
                await self._remove(copy)
            if not copy.dead:
                return copy
        return None

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    # ---- loading and dying ----

    def _may_load(self, service: str) -> bool:
        own = self._copies[service]
        if service in self._loading or (own and service in self._no_more):
            return False
        if not own or not self._mem_mib:
            return True
        loading = [self._copies[name][0] for name in self._loading if self._copies[name]]
        # a copy that is being loaded counts as large as the first of its service
        occupied = sum(copy.mib for copy in [*self._all(), *loading])
        return own[0].mib + occupied <= self._mem_mib

    def _load_another(self, service: str) -> None:
        task = self._loading[service] = asyncio.ensure_future(self._load(service))
        task.add_done_callback(raise_failure)
        task.add_done_callback(lambda task: self._end_load(service, task))

    async def _load(self, service: str) -> None:
        own = self._copies[service]
        try:
            own.append(await self._loaded(service))
        except ServiceRefused as error:
            if own:
                self._no_more.add(service)
            else:
                # somebody may do what the reason says: start the engine again, or copy the model
                self._refused[service] = str(error), time.monotonic() + REFUSED_S
        finally:  # the done-callback runs later: a caller could then await a finished load
            self._end_load(service, self._loading[service])
        if 0 < len(own) < self._preload[service] and self._may_load(service):
            self._load_another(service)

    def _end_load(self, service: str, task: asyncio.Task[None]) -> None:
        """Forgets a load that has ended, also one that was given up before it began."""
        if self._loading.get(service) is task:
            del self._loading[service]
            self._changed()

    async def _loaded(self, service: str) -> ServiceCopy:
        for attempt in range(1, DEATHS + 1):
            self._numbers += 1
            spec = self._specs[service]
            backend = self._make(spec, self._numbers)
            try:
                async with self._loads if backend.loads_here else nullcontext():
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
            return ServiceCopy(service, backend, mib, outdated=self._specs[service] is not spec)
        raise AssertionError("unreachable")

    async def _remove(self, copy: ServiceCopy) -> None:
        if not copy.dead:
            copy.dead, copy.block = True, ()
            self._cache.forget(copy)
            self._copies[copy.service].remove(copy)
            with suppress(ServiceDied, OutOfDeviceMemory):
                await copy.backend.close()
            self._changed()
