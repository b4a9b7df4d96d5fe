"""A worker's driver for tests, with a link, a timer and an executor that do no I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tangram_hpc.domain.action import Action
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import SpillFiles
from tangram_hpc.protocol import message as ms
from tangram_hpc.worker.driver import WorkerDriver

SPEC = NodeSpec("n1", "host", (0, 1), 1024)
DONE = Outcome(ActionState.COMPLETED)


class Wire:
    """The far end of a link; keeps what arrived, frame by frame."""

    def __init__(self) -> None:
        self.queued: list[tuple[Any, Any]] = []
        self.frames: list[list[tuple[Any, Any]]] = []
        self.closed = False
        self.unsent = 0

    def send(self, message: ms.Message, payload: Any = None) -> None:
        assert (payload is not None) == bool(getattr(message, "n", 0))
        self.queued.append((message, payload))

    def flush(self) -> None:
        if self.queued:
            self.frames.append(self.queued)
            self.queued = []

    def close(self) -> None:
        self.closed = True

    def said(self) -> list[Any]:
        return [message for frame in self.frames for message, _ in frame]


class Hand:
    """A timer that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def after(self, delay_s: float, call: Callable[[], None]) -> object:
        self.calls.append((self.now + delay_s, call))
        return None

    def turn(self, seconds: float = 0.0) -> None:
        end = self.now + seconds
        while due := sorted((at for at, _ in self.calls if at <= end)):
            self.now = due[0]
            ready = [one for one in self.calls if one[0] <= self.now]
            self.calls = [one for one in self.calls if one[0] > self.now]
            for _, call in ready:
                call()
        self.now = end


class Orders:
    """An executor that only notes its orders, and has the snapshots that a test gives it."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []
        self.snapshots: list[ms.SnapshotReport] = []

    def snapshot_reports(self) -> list[ms.SnapshotReport]:
        return self.snapshots

    def follow(self, order: ms.StartAttempt, payload: memoryview) -> bool:
        return False  # it keeps no prefetched leases of its own

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.got.append((name, *args))


class Rig:
    """A worker driver with a link, a timer and an executor that do no I/O. It has joined as node 1,
    if it `joins` at once."""

    def __init__(self, uid: str = "", spill: SpillFiles | None = None,
                 joins: bool = True) -> None:
        self.wire, self.hand, self.orders = Wire(), Hand(), Orders()
        self.ended: list[str] = []
        self.driver = WorkerDriver("7", SPEC, self.wire, self.hand,
                                   lambda reports, welcome: self.orders, self.ended.append, 0.0,
                                   uid, spill)
        self.driver.start()
        if joins:
            self.driver.receive(ms.WorkerWelcome(1, "/store"), None)
        self.hand.turn()

    def start(self, lease: int, after: int = 0) -> None:
        order = ms.StartAttempt(lease, Action(lease, "a"), (0,), after=after)
        self.driver.receive(order, memoryview(b"p"))

    def dial(self) -> Wire:
        """Connects again; returns the new link, which has carried the hello."""
        wire = Wire()
        self.driver.rejoin(wire)
        self.hand.turn()
        return wire

    def come_back(self) -> list[tuple[Any, Any]]:
        """Connects again, is welcomed as node 1, and returns what was sent behind the hello."""
        wire = self.dial()
        self.driver.receive(ms.WorkerWelcome(1, "/store"), None)
        self.hand.turn()
        return [envelope for frame in wire.frames for envelope in frame][1:]
