"""The disk under a broker's files: a place in its writes at which it is killed, or an error.

`DiskCalls` stands in for the module `os` in the storage modules. Everything is written to a real
folder; only the next write strikes if a fault is armed. Work for other threads runs as a timer of
the process that gave it, so that it has its place in the order of everything else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram_hpc import atomic_file

if TYPE_CHECKING:
    from swarm.world import Process, World


class ProcessKilled(BaseException):
    """A process is killed in the middle of a step."""


class DiskCalls:
    """`os` for the storage modules of one world.

    Attributes:
        armed: what happens at the next write: "" for nothing, else "before", "within" or "after"
            for a kill there, "ENOSPC" or "EIO" for an error, "supersede" for another broker that
            takes over while this one is stopped in front of the write.
        failed: whether an error was raised that nobody has noticed yet.
        synced: by the path of a file, how many of its bytes survive the machine's failure.
    """

    def __init__(self, world: World) -> None:
        self._world, self.armed, self.failed = world, "", False
        self.synced: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        """Writes, unless something strikes here."""
        strike, self.armed = self.armed, ""
        if strike == "supersede":
            self._world.supersede_within()
        elif strike:
            part = {"before": 0, "after": len(data)}.get(
                strike, self._world.rng.randrange(len(data) + 1))
            os.write(fd, bytes(data)[:part])
            self._fail(strike)
        return os.write(fd, data)

    def fdatasync(self, fd: int) -> None:
        """Notes what survives the machine's failure."""
        self.fsync(fd)

    def fsync(self, fd: int) -> None:
        """See `fdatasync`."""
        self.synced[os.readlink(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size

    def replace_file(self, path: Path, data: bytes, sync: bool = False, **more: Any) -> None:
        """Replaces a file in one step, unless something strikes before or after it."""
        strike, self.armed = self.armed, ""
        if strike not in ("", "supersede", "after"):
            self._fail(strike)
        atomic_file.replace_file(path, data, sync=False, **more)
        self.synced[os.path.realpath(path)] = len(data)
        if strike == "after":
            self._fail(strike)

    def _fail(self, strike: str) -> None:
        number = getattr(errno, strike, 0)
        if number:
            self.failed = True
            raise OSError(number, os.strerror(number))
        raise ProcessKilled


class LaterThread:
    """One thread of a process (`ThreadPoolExecutor(1)`): its work runs when its turn comes."""

    def __init__(self, owner: Process) -> None:
        self._owner = owner
        self._work: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append((future, call, args))
        if len(self._work) == 1:
            self._owner.after(self._owner.world.rng.choice((0.0, 0.001, 0.02)), self._next)
        return future

    def _next(self) -> None:
        if self._work:
            future, call, args = self._work[0]
            try:
                future.set_result(call(*args))
            except Exception as error:  # noqa: BLE001 - the future has it, as in a pool
                future.set_exception(error)
            del self._work[0]
        if self._work:
            self._owner.after(0, self._next)

    def shutdown(self) -> None:
        while self._work:
            self._next()

    def died(self) -> None:
        """The process is gone: only file descriptors are closed, as the kernel would."""
        for _, call, args in self._work:
            if call is os.close:
                os.close(*args)
        self._work.clear()
