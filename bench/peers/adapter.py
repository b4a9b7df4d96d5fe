"""What every peer is asked for, and how it is measured: one small class a peer.

An adapter starts its peer on some cores and gives it work; it holds no clock but for `mixed`. It
uses the peer as the peer's own documentation says is fast for the work: its docstring says how.
What a peer cannot do is in `lacks`, with the reason, and appears in the results.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from work import Task

MEASUREMENTS = ("functions", "chunks", "commands", "sandboxed", "idle", "mixed")


class Peer(ABC):
    """One peer. The driver calls `start` once, then any of the other methods, then `stop`.

    Attributes:
        name: how the results call it.
        packages: the distributions that must be installed, the first one gives the version.
        programs: the programs that must be on the PATH.
        version: the command that prints the version, if no package gives it.
        burst_s: how long the burst that counts must last at least.
        schedules: whether it dispatches work to several nodes; else it is a pool of one machine.
        slurm: whether it runs in an allocation of a Slurm cluster, which the driver boots.
        measured: what is measured of it; see `MEASUREMENTS`.
        lacks: measurement -> why this peer is left out of it.
    """

    name: str
    packages: Sequence[str] = ()
    programs: Sequence[str] = ()
    version: Sequence[str] = ()
    burst_s: float = 1.0
    schedules: bool = True
    slurm: bool = False
    measured: Sequence[str] = MEASUREMENTS
    lacks: dict[str, str] = {}

    def __init__(self, cores: int, folder: Path) -> None:
        self.cores = cores
        self.folder = folder

    @classmethod
    def command(cls, argv: list[str], cores: int) -> list[str]:
        """The command line that runs `argv`, the adapter's process, on `cores` cores."""
        return argv

    @classmethod
    def missing(cls) -> str:
        """Why the peer cannot run here, apart from what is not installed; empty if it can."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Starts the peer; it is ready for work, but nothing was run yet."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all of it."""

    def first(self) -> None:
        """Runs the first piece of work: its end is the end of the cold start."""
        self.one()

    def functions(self, count: int) -> float | None:
        """Submits `count` functions, each with a result of its own, and waits for all. This burst
        and the other ones may return how many seconds they took, if the peer's own wait is too
        coarse to measure them."""
        raise NotImplementedError

    def chunks(self, count: int) -> float | None:
        """The same by the peer's call for many functions at once, in chunks."""
        raise NotImplementedError

    def commands(self, count: int) -> float | None:
        """Runs /bin/true `count` times."""
        raise NotImplementedError

    def sandboxed(self, count: int) -> float | None:
        """Runs /bin/true `count` times, each in a sandbox."""
        raise NotImplementedError

    def one(self) -> None:
        """Runs one function, and waits for its result."""
        raise NotImplementedError

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """Submits one mixed task; `ended` is called with its future when its end is known here."""
        raise NotImplementedError

    def mixed(self, tasks: Sequence[Task]) -> list[float]:
        """Submits each task when it arrives; returns the seconds from arrival to known end."""
        return submit_on_time(tasks, self.sized)


def submit_on_time(tasks: Sequence[Task], submit: Callable[[Task, Callable[[Any], None]], None]
                   ) -> list[float]:
    """Submits each task at its time; returns the seconds from its planned arrival to its end, so
    that a slow submission counts. A task that failed raises here, after all have ended."""
    took, left, over = [0.0] * len(tasks), len(tasks), threading.Event()
    futures: list[Any] = []
    lock, began = threading.Lock(), time.perf_counter()

    def end_of(number: int) -> Callable[[Any], None]:
        def ended(future: Any) -> None:
            nonlocal left
            took[number] = time.perf_counter() - began - tasks[number].at_s
            with lock:
                futures.append(future)
                left -= 1
                if not left:
                    over.set()
        return ended

    for number, task in enumerate(tasks):
        wait_s = began + task.at_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        submit(task, end_of(number))
    if not over.wait(120):
        raise TimeoutError(f"mixed: {left} of {len(tasks)} tasks have not ended after 120 s")
    done(futures)
    return took


def done(futures: Iterable[Any]) -> None:
    """Submits all, if they come from an iterator, then waits for all. Raises if one has failed: a
    command of ours that failed has a result, which says so."""
    for future in list(futures):
        result = future.result()
        if hasattr(result, "check"):
            result.check()
