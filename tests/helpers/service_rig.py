"""A node's services driven by hand: fake copies that do as they are told, and what was reported."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tangram_hpc.config.services import service_spec
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.errors import StoreFailed
from tangram_hpc.ports import (
    OutOfDeviceMemory,
    ServiceDied,
    ServiceRefused,
    ServiceReply,
    ServiceRequest,
)
from tangram_hpc.protocol.message import StartAttempt
from tangram_hpc.protocol.payload import (
    ErrorReturn,
    ServiceCall,
    Stored,
    ValueReturn,
    decode,
    encode,
)
from tangram_hpc.protocol.value import decode_value, encode_value
from tangram_hpc.services.processes.service_executor import ServiceExecutor


class FakeCopy:
    """Answers `{"fake": n}` for a request that says n. A method `die` ends it, `too-big` does not
    fit beside another request, `hang` never ends, `wrong` is refused."""

    def __init__(self, rig: Rig, spec: ServiceSpec, number: int) -> None:
        self.shares_gpu = self.loads_here = not spec.name.startswith("engine")
        self.rig, self.spec, self.number = rig, spec, number
        self.state, self.killed = "new", asyncio.Event()

    def log(self, *words: object) -> None:
        self.rig.log.append((self.spec.name, self.number, *words))

    async def load(self) -> int:
        self.log("load")
        if self.spec.name in self.rig.never_load:
            await asyncio.Event().wait()
        order = "load", self.spec.name
        trouble = self.rig.trouble.pop(order, None) or self.rig.always.get(order)
        if trouble is not None:
            raise trouble
        if sum(c.spec.name == self.spec.name for c in self.rig.copies) > 1:
            await asyncio.sleep(self.rig.load_s)
        self.state = "parked"
        return 1

    async def _trouble(self, order: str) -> None:
        """Takes as long as such an order takes, and raises what it is to meet."""
        await asyncio.sleep(self.rig.move_s)
        trouble = self.rig.trouble.pop((order, self.spec.name), None)
        if isinstance(trouble, ServiceDied):
            self.state = "dead"
        if trouble is not None:
            raise trouble

    async def wake(self, gpus: tuple[int, ...]) -> None:
        assert self.state == "parked", self.state
        await self._trouble("wake")
        beside = []
        for other in self.rig.copies:
            stands = getattr(other, "gpus", ())
            if other.state == "awake" and not set(stands).isdisjoint(gpus):
                beside.append(other)
        assert len(beside) <= max(0, self.rig.cache_mib - 1), "too many on one GPU"
        if len(beside) >= self.rig.device_mib:
            raise OutOfDeviceMemory("the device is full")
        self.state, self.gpus = "awake", gpus
        self.log("wake", gpus)

    async def stand_by(self) -> None:
        assert self.state == "awake", self.state
        await self._trouble("stand_by")

    async def park(self) -> None:
        assert self.state == "awake", self.state
        try:
            await self._trouble("park")
        except asyncio.CancelledError:
            self.state = "interrupted"  # nobody may do this to a copy that lives on
            raise
        self.state = "parked"
        self.log("park")

    async def call(self, requests: list[ServiceRequest]) -> list[ServiceReply]:
        assert self.state == "awake", self.state
        methods = [r.method for r in requests]
        self.log("call", [decode_value(r.arguments) for r in requests])
        await asyncio.sleep(self.rig.call_s)
        await self.rig.may_end.wait()
        if "die" in methods:
            self.state = "dead"
            raise ServiceDied("it was told to")
        if "too-big" in methods and len(methods) > 1:
            raise OutOfDeviceMemory("too many at once")
        if "huge" in methods:
            raise OutOfDeviceMemory("too large")
        if "alone" in methods and any(
                other is not self and other.state == "awake" and other.gpus == self.gpus
                for other in self.rig.copies):
            raise OutOfDeviceMemory("other copies take its room")
        if "hang" in methods:
            await self.killed.wait()
            self.state = "dead"
            raise ServiceDied("it was killed")
        return [ServiceReply(error="it is wrong") if r.method == "wrong" else
                ServiceReply(encode_value({"fake": decode_value(r.arguments)})) for r in requests]

    def kill(self) -> None:
        self.killed.set()

    async def close(self) -> None:
        self.state = "closed"
        self.log("close")


class Shelf:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.full = False

    def put(self, data: bytes, owner: str = "") -> str:
        if self.full:
            raise StoreFailed(errno.ENOSPC, "store: cannot write (No space left on device)")
        self.kept[str(len(self.kept))] = bytes(data)
        return str(len(self.kept) - 1)

    def get(self, digest: str) -> bytes:
        return self.kept[digest]


@dataclass
class Rig:
    """An executor; each copy takes 1 MiB."""

    mem_mib: int = 0
    cache_mib: int = 0
    device_mib: int = 99  # what there really is on each GPU
    load_s: float = 0.0  # of copies after a service's first
    call_s: float = 0.0
    move_s: float = 0.0  # of wake, stand_by and park
    log: list[tuple[object, ...]] = field(default_factory=list)
    trouble: dict[tuple[str, str], Exception] = field(default_factory=dict)
    always: dict[tuple[str, str], Exception] = field(default_factory=dict)  # of each load
    never_load: set[str] = field(default_factory=set)  # services whose copies load for ever
    copies: list[FakeCopy] = field(default_factory=list)
    ends: dict[int, Outcome] = field(default_factory=dict)
    values: dict[int, object] = field(default_factory=dict)
    unclean: set[int] = field(default_factory=set)
    lease: int = 0

    def __post_init__(self) -> None:
        self.store = Shelf()
        self.may_end = asyncio.Event()  # while it is cleared, no call of a copy ends
        self.may_end.set()
        self.executor = ServiceExecutor(self, self.store, self._make, self.mem_mib,
                                        cache_mib=self.cache_mib)

    def _make(self, spec: ServiceSpec, number: int) -> FakeCopy:
        self.copies.append(FakeCopy(self, spec, number))
        return self.copies[-1]

    # ---- ports.Reports

    def started(self, lease: int) -> None:
        assert lease not in self.ends

    def finished(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                 settles: bool = False) -> None:
        assert lease not in self.ends, f"lease {lease} ended twice"
        self.ends[lease] = outcome
        if not clean:
            self.unclean.add(lease)
        told = decode(payload) if payload is not None else None
        if isinstance(told, Stored):
            told = decode(self.store.get(told.digest))
        if isinstance(told, ValueReturn):
            self.values[lease] = decode_value(told.data)
        elif isinstance(told, ErrorReturn):
            self.values[lease] = told.text

    def settled(self) -> None:
        pass

    def released(self, lease: int) -> None:
        self.unclean.remove(lease)

    # ---- by hand

    def declare(self, name: str, **fields: object) -> None:
        told = {"batch": 4, "batch_wait_ms": 1.0, **fields}
        self.executor.prepare(service_spec(name, {"backend": "fake", **told}))

    def call(self, service: str, value: object = 0, method: str = "echo",
             gpus: tuple[int, ...] = (0,), timeout_s: float = 0, tokens: int = 1) -> int:
        self.lease += 1
        action = Action(self.lease, "x", Kind.CALL, (len(gpus),), f"service:{service}",
                        timeout_ns=round(timeout_s * 1e9))
        payload = encode(ServiceCall(method, encode_value(value), tokens))
        self.executor.start(StartAttempt(self.lease, action, (), gpus), memoryview(payload))
        return self.lease

    async def all(self, *leases: int) -> None:
        """Waits until these have ended and nothing of them is left."""
        for _ in range(2000):
            if all(x in self.ends and x not in self.unclean for x in leases):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"no end of {[x for x in leases if x not in self.ends]}: "
                             + json.dumps(self.log, default=str))

    def of(self, word: str) -> list[tuple[object, ...]]:
        """What of this was logged."""
        return [entry for entry in self.log if entry[2] == word]


def play(scene: Callable[[Rig], Awaitable[None]], **fields: object) -> Rig:
    """Runs a scene on a fresh rig, then closes it; nothing may be left."""
    async def run() -> Rig:
        rig = Rig(**fields)
        await scene(rig)
        rig.executor.close()
        await rig.executor.closed()
        assert all(copy.state == "closed" for copy in rig.copies), [c.state for c in rig.copies]
        assert not rig.unclean
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()
        return rig
    return asyncio.run(run())


REFUSED = ServiceRefused("model: not here; name another")
