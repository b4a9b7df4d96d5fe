"""Peers that start programs: GNU parallel, and srun inside of an allocation."""

from __future__ import annotations

import subprocess
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
        """Nothing stands."""

    def stop(self) -> None:
        """Nothing stands."""

    def first(self) -> None:
        """One program."""
        self.commands(1)

    def commands(self, count: int) -> None:
        """`-n0`: the lines only count."""
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
        """An allocation around it."""
        return ["salloc", "-Q", "-N1", "-n1", f"-c{cores}", "-t10", *argv]

    def start(self) -> None:
        """Threads, of which each waits for one srun."""
        self.threads = ThreadPoolExecutor(64 if self.cores > 2 else self.cores)

    def stop(self) -> None:
        """Ends the threads."""
        self.threads.shutdown()

    def first(self) -> None:
        """One program."""
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
