"""A real client and a real broker driver in one process, and a link between them that a test cuts.

The client's thread carries its frames to the broker itself. A test that speaks for a worker holds
the same lock (`LinkRig.worker_says`). Nothing here waits for a fixed time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.broker_rig import BrokerRig, FakePeer
from tangram_hpc.client.client import Client
from tangram_hpc.errors import BrokerUnreachable
from tangram_hpc.ports import ChannelLost
from tangram_hpc.protocol.frame import Buffer, Envelope, Inbox
from tangram_hpc.storage.store import FolderStore

DEADLINE_S = 30.0


class RigChannel:
    """One connection of the client (`ports.Channel`).

    Attributes:
        deaf: whether what the client sends is lost on its way, without the client's knowledge.
        cut: whether the connection is broken.
    """

    via = "socket"

    def __init__(self, link: LinkRig) -> None:
        self._link, self.deaf, self.cut, self._woken, self._read = link, False, False, False, 0
        self.peer = FakePeer(link.broker)

    def send(self, frame: list[Buffer]) -> None:
        with self._link.changed:
            if self.cut:
                raise ChannelLost("cut")
            if not self.deaf:
                for envelope in Inbox().feed(b"".join(frame)):
                    self._link.broker.broker.receive(self.peer.peer, *envelope)
                self._link.broker.settle()
            self._link.changed.notify_all()
        self._link.on_sent()

    def wait(self, timeout_s: float, busy: bool) -> Iterator[Envelope]:
        with self._link.changed:
            self._link.changed.wait_for(
                lambda: self.cut or self._woken or len(self.peer.heard) > self._read, timeout_s)
            if self.cut:
                raise ChannelLost("cut")
            self._woken = False
            heard, self._read = self.peer.heard[self._read:], len(self.peer.heard)
        for message, payload in heard:
            yield message, None if payload is None else memoryview(payload)

    def wake(self) -> None:
        with self._link.changed:
            self._woken = True
            self._link.changed.notify_all()

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class LinkRig:
    """A client, its broker and a worker of one node.

    Attributes:
        broker: the broker's rig.
        worker: the worker that a test speaks for.
        client: the client.
        channel: the client's connection, or its last one.
        on_dial: called by the client's thread before it connects.
        on_sent: called by the client's thread after it has sent what was queued.
    """

    def __init__(self, folder: Path) -> None:
        # a finalizer may wake the client's thread while this very thread holds the lock
        self.changed = threading.Condition(threading.RLock())
        self.broker = BrokerRig()
        self.worker = self.broker.worker(gpus=(0,))
        self._open = True
        self.on_dial: Callable[[], None] = lambda: None
        self.on_sent: Callable[[], None] = lambda: None
        self.channel: RigChannel
        self._folder = folder
        self.client = self.new_client()

    def new_client(self) -> Client:
        """Another client of the same broker; `broken` breaks the newest client's connection."""
        return Client([self._dial], "j", lambda _: FolderStore(self._folder), connect_s=DEADLINE_S)

    def _dial(self) -> RigChannel:
        with self.changed:
            if not self._open:
                raise BrokerUnreachable("the test keeps the link broken")
            self.on_dial()
            self.channel = RigChannel(self)
            return self.channel

    def worker_says(self, message: Any, payload: bytes | None = None) -> None:
        with self.changed:
            self.worker.say(message, payload)
            self.changed.notify_all()

    @contextmanager
    def broken(self) -> Iterator[None]:
        """The connection is broken within the block, and both ends know it."""
        with self.changed:
            self._open, self.channel.cut = False, True
            self.channel.peer.leave()
            self.changed.notify_all()
        yield
        with self.changed:
            self._open = True

    def until(self, met: Callable[[], Any], what: str) -> Any:
        """Waits until a condition is met, and returns its value."""
        end = time.monotonic() + DEADLINE_S
        while True:
            with self.changed:
                if found := met():
                    return found
            assert time.monotonic() < end, f"never: {what}"
            time.sleep(0.005)

    def close(self) -> None:
        self.client.close()


@contextmanager
def link_rig(folder: Path) -> Iterator[LinkRig]:
    """A rig that is closed at the end."""
    rig = LinkRig(folder)
    try:
        yield rig
    finally:
        rig.close()
