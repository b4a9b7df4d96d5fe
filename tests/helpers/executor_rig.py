"""An executor on a loop of its own for tests, with all that it reported."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.client.functions import pickled_by_value
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.protocol.message import SnapshotReport, StartAttempt, StreamMessage
from tangram_hpc.protocol.payload import (
    ExecCall,
    ExecReturn,
    FileCall,
    FunctionCall,
    Payload,
    Stored,
    decode,
    encode,
)
from tangram_hpc.protocol.value import decode_value
from tangram_hpc.resources import process_tree
from tangram_hpc.resources.cpu import affinity
from tangram_hpc.resources.gpu.devices import Device, Devices
from tangram_hpc.resources.gpu.gpu_meter import GpuMeter
from tangram_hpc.sandbox.manager import backends
from tangram_hpc.sandbox.manager.backends import Backends
from tangram_hpc.sandbox.manager.node_attempts import NodeSession
from tangram_hpc.sandbox.manager.sandbox_executor import SandboxExecutor
from tangram_hpc.storage.store import FolderStore

DEADLINE_S = 40.0
FOUR = Devices(tuple(Device(n, selector=str(n)) for n in range(4)), "cuda")  # by Slurm's word
NOTHING = ExecCall(argv=("/bin/true",))
SECRETS = {"SLURM_JOB_ID": "7", "TANGRAM_ACCESS": "/secret", "PMI_FD": "9", "MY_API_KEY": "k"}


def as_an_ordinary_user(settings: SandboxSettings) -> Backends:
    """What an ordinary user's worker finds here. A worker that is root offers no `process` sandbox
    to untrusted code; the tests try that sandbox as root all the same, since it must hold there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "is_root", lambda: False)
        return Backends.probed(settings.isolation, settings.read_paths)


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Rig:
    """An executor on a loop of its own, and all that it reported."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._before = set(process_tree.descendants(os.getpid()))  # of earlier tests
        self.store = FolderStore(folder / "store")
        self.scratch = folder / "scratch"
        self.done: dict[int, tuple[Outcome, Any, bool]] = {}
        self.free: set[int] = set()
        self.events: list[tuple[Any, ...]] = []
        self.up: set[int] = set()
        self.down: dict[int, str] = {}
        self.packed: dict[int, str] = {}
        self.snapshots: list[SnapshotReport] = []
        self.pieces: dict[int, list[tuple[int, bytes]]] = {}
        self.credit: dict[int, int] = {}
        self.streams: list[tuple[StreamMessage, bytes | None]] = []
        self.lease = 0
        self.unsettled: set[int] = set()  # leases that ended with `settles`, and not a turn later
        options.setdefault("cores", affinity.usable()[:2])
        cores = options.pop("cores")
        self.trusted = options.pop("trusted", True)
        self.again = options.pop("again", False)  # what runs in a session is the second of its kind
        self._busy: dict[int, int] = {}  # the last lease that ran a command, of each session
        pinned = options.pop("pinned", None)
        meter = GpuMeter(options.pop("devices", FOUR))
        settings = SandboxSettings(**{"kill_wait_s": 0.5, "warm": 0, **options})
        found = as_an_ordinary_user(settings)
        self.cores: tuple[int, ...] = cores

        async def make() -> SandboxExecutor:
            return SandboxExecutor(self, self.store, self.scratch, cores, settings, pinned=pinned,
                                   gpus=meter, backends=found)

        self.executor = self.loop.run_until_complete(make())

    def session(self, number: int) -> NodeSession:
        """What the executor keeps of an open session."""
        found = self.executor._sessions.get(number)
        assert found is not None, f"session {number} is not open"
        return found

    def returned(self, lease: int) -> None:
        self.events.append(("returned", lease))

    def started(self, lease: int) -> None:
        self.events.append(("started", lease))

    def finished(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                 settles: bool = False) -> None:
        assert lease not in self.done
        self.events.append(("finished", lease))
        if settles:
            self.unsettled.add(lease)
            self.loop.call_soon(self.events.append, ("turned", lease))
        if payload is not None and isinstance(reference := decode(payload), Stored):
            payload = self.store.get(reference.digest)
        self.done[lease] = (outcome, None if payload is None else decode(payload), clean)
        if clean:
            self.free.add(lease)

    def settled(self) -> None:
        late = {lease for lease in self.unsettled if ("turned", lease) in self.events}
        assert not late, f"{late} were to be settled in the turn they ended in"
        self.unsettled.clear()

    def released(self, lease: int) -> None:
        assert lease in self.done and lease not in self.free
        self.events.append(("released", lease))
        self.free.add(lease)

    def output(self, lease: int, stream: int, data: bytes) -> None:
        assert lease not in self.done
        self.pieces.setdefault(lease, []).append((stream, data))

    def input_credit(self, lease: int, count: int) -> None:
        assert lease not in self.done
        self.credit[lease] = self.credit.get(lease, 0) + count

    def stream(self, message: StreamMessage, data: bytes | None = None) -> None:
        self.streams.append((message, data))

    def session_up(self, session: int, image: str = "") -> None:
        self.up.add(session)

    def session_down(self, session: int, reason: str, infeasible: bool = False) -> None:
        self.down[session] = reason

    def session_packed(self, session: int, files: str) -> None:
        self.packed[session] = files

    def background_wants(self, session: int) -> None:
        self.events.append(("wants", session))

    def snapshot(self, report: SnapshotReport) -> None:
        self.snapshots.append(report)

    def until(self, true: Callable[[], bool], seen: object = "") -> None:
        """Waits until `true()`; a failure prints `seen`, into which `true` may put what it saw."""
        async def wait() -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not true():
                assert time.monotonic() < deadline, f"never happened; {self.events[-5:]} {seen}"
                await asyncio.sleep(0.002)

        self.loop.run_until_complete(wait())

    def begin(self, call: Payload, kind: Kind, *, cores: tuple[int, ...] | None = None,
              gpus: tuple[int, ...] = (), store: bool = False, **action: Any) -> int:
        action.setdefault("trusted", self.trusted)
        session = action.get("session", 0) if kind is Kind.EXEC else 0
        if session and self.again and call != NOTHING and (
                self._busy.get(session, 0) in {0, *self.free}):
            self.end(self.begin(NOTHING, kind, cores=cores, gpus=gpus, **action))
        self.lease += 1
        if session:
            self._busy[session] = self.lease
        order = StartAttempt(self.lease, Action(id=self.lease, name="t", kind=kind, **action),
                             self.cores[:1] if cores is None else cores, gpus)
        payload = encode(call)
        if store:
            payload = encode(Stored(self.store.put(payload), len(payload)))
        self.loop.call_soon(self.executor.start, order, memoryview(payload))
        return self.lease

    def end(self, lease: int) -> tuple[Outcome, Any, bool]:
        self.until(lambda: lease in self.free)
        return self.done[lease]

    def exec(self, *argv: str, **fields: Any) -> tuple[Outcome, ExecReturn]:
        call = ExecCall(argv=argv, **{k: fields.pop(k) for k in list(fields)
                                      if k in ExecCall.__struct_fields__})
        outcome, back, _ = self.end(self.begin(call, Kind.EXEC, **fields))
        return outcome, back

    def shell(self, text: str, **fields: Any) -> tuple[Outcome, ExecReturn]:
        return self.exec(shell=text, **fields)

    def file(self, path: str, data: bytes | None = None, session: int = 1) -> tuple[Outcome, Any]:
        return self.end(self.begin(FileCall(path, data), Kind.FILE, session=session, cores=()))[:2]

    def function(self, function: Any, *args: Any, pickled: bool = False,
                 **action: Any) -> tuple[Outcome, Any, bool]:
        return self.end(self.begin_function(function, *args, pickled=pickled, **action))

    def begin_function(self, function: Any, *args: Any, pickled: bool = False,
                       **action: Any) -> int:
        digest = self.store.put(pickled_by_value(function, "function"))
        call = FunctionCall(digest, pickle.dumps((args, {})), pickled)
        return self.begin(call, Kind.FUNCTION, **action)

    def value(self, function: Any, *args: Any) -> Any:
        outcome, back, _ = self.function(function, *args)
        assert outcome.state is ActionState.COMPLETED, (outcome, back)
        return decode_value(back.data)

    def open(self, session: int = 1, **spec: Any) -> None:
        spec.setdefault("trusted", self.trusted)
        self.loop.call_soon(self.executor.open_session, SessionSpec(session, **spec))
        self.until(lambda: session in self.up)

    def processes(self) -> list[int]:
        return [p for p in process_tree.descendants(os.getpid())
                if p not in self._before and alive(p)]

    def close(self) -> None:
        async def close() -> None:
            self.executor.close()

        self.loop.run_until_complete(close())
        assert not self.unsettled
        assert self.free == set(self.done)
        assert not self.scratch.exists(), list(self.scratch.rglob("*"))
        self.loop.close()


