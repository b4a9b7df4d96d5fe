"""Peers that start programs: GNU parallel, srun inside of an allocation, and no system at all."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import work
from adapter import Peer, done
from work import Task

ONLY_PROGRAMS = "it runs programs only"


class GnuParallel(Peer):
    """`parallel -j CORES` with one line of input for each program. It stands for no service: every
    burst is a start of its own."""

    name = "GNU parallel"
    programs = ("parallel",)
    version = ("parallel", "--version")
    burst_s = 3.0  # so that its start, 0.2 s, does not decide
    lacks = {"functions": ONLY_PROGRAMS, "chunks": ONLY_PROGRAMS, "idle": ONLY_PROGRAMS,
             "mixed": "a job cannot ask for a number of cores", "sandboxed": "it has no sandboxes"}

    def start(self) -> None:
        """Does nothing: no service runs between the bursts."""

    def stop(self) -> None:
        """Does nothing: no service runs between the bursts."""

    def first(self) -> None:
        """Runs one program."""
        self.commands(1)

    def commands(self, count: int) -> None:
        """Runs `parallel -n0`, which starts a program for each line and passes no line on."""
        subprocess.run(["parallel", "--will-cite", "-j", str(self.cores), "-n0", work.TRUE],
                       input="\n" * count, text=True, check=True, capture_output=True)


class Srun(Peer):
    """A job step for each program, started by threads inside of one allocation that stands (Slurm
    on this machine, its dev cluster without accounting): `srun --exact -n1 -cCORES`. The cold start
    counts the allocation too."""

    name = "srun"
    programs = ("srun", "salloc")
    version = ("slurmctld", "-V")
    slurm = True
    lacks = {"functions": ONLY_PROGRAMS, "chunks": ONLY_PROGRAMS, "idle": ONLY_PROGRAMS,
             "sandboxed": "it has no sandboxes"}

    @classmethod
    def command(cls, argv: list[str], cores: int) -> list[str]:
        """Returns the command line with an allocation around it."""
        return ["salloc", "-Q", "-N1", "-n1", f"-c{cores}", "-t10", *argv]

    def start(self) -> None:
        """Threads, of which each waits for one srun."""
        self.threads = ThreadPoolExecutor(64 if self.cores > 2 else self.cores)

    def stop(self) -> None:
        """Ends the threads."""
        self.threads.shutdown()

    def first(self) -> None:
        """Runs one program."""
        self._step(1, [work.TRUE])

    def commands(self, count: int) -> None:
        """As many at a time as there are cores."""
        done([self.threads.submit(self._step, 1, [work.TRUE]) for _ in range(count)])

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """A step with a number of cores; Slurm lets those wait that find none."""
        self.threads.submit(self._step, task.cores, ["/bin/sleep", str(task.seconds)]
                            ).add_done_callback(ended)

    def _step(self, cores: int, argv: Sequence[str]) -> None:
        subprocess.run(["srun", "-Q", "--exact", "-n1", f"-c{cores}", *argv], check=True,
                       stdin=subprocess.DEVNULL, capture_output=True)


class PlainChildren(Peer):
    """No system at all: this process starts each program as its child, in the order of arrival,
    where one that needs more cores than are free lets others pass. Nothing is sent, isolated or
    kept. So its figure is what programs cost on this machine without any system. It is no peer."""

    name = "plain children"
    schedules = False
    measured = ("mixed",)

    def start(self) -> None:
        """Lets the end of a child wake `select`."""
        self.ends, write = os.pipe()
        for end in (self.ends, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write)

    def stop(self) -> None:
        """Does nothing: no service runs between the bursts."""

    def first(self) -> None:
        """Runs one program."""
        os.waitpid(os.posix_spawn(work.TRUE, [work.TRUE], {}), 0)

    def mixed(self, tasks: Sequence[Task]) -> list[float]:
        """First-fit, without any knowledge of the times."""
        took, free, began = [0.0] * len(tasks), self.cores, time.perf_counter()
        coming, waiting, running = deque(range(len(tasks))), list[int](), dict[int, int]()
        while coming or waiting or running:
            while coming and began + tasks[coming[0]].at_s <= time.perf_counter():
                waiting.append(coming.popleft())
            for number in list(waiting):
                if tasks[number].cores <= free:
                    free -= tasks[number].cores
                    waiting.remove(number)
                    argv = ["/bin/sleep", f"{tasks[number].seconds:.4f}"]
                    running[os.posix_spawn(argv[0], argv, {})] = number
            self._wait(began + tasks[coming[0]].at_s if coming else None)
            while running and (child := os.waitpid(-1, os.WNOHANG)[0]):
                number = running.pop(child)
                took[number] = time.perf_counter() - began - tasks[number].at_s
                free += tasks[number].cores
        return took

    def _wait(self, until: float | None) -> None:
        """Waits for the end of a child, at most until the next task arrives."""
        left_s = None if until is None else max(0.0, until - time.perf_counter())
        if select.select([self.ends], [], [], left_s)[0]:
            os.read(self.ends, 4096)
