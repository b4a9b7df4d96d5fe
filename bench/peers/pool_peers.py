"""Peers that are pools of Python processes: ProcessPoolExecutor, mpi4py.futures, executorlib."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import work
from adapter import Peer, done

NO_CORES = "a task cannot ask for a number of cores"


class Pool(Peer):
    """A pool of persistent workers with the interface of `concurrent.futures.Executor`. Functions
    are submitted one by one; `chunks` is `map` with four chunks for each worker."""

    lacks = {"mixed": NO_CORES, "sandboxed": "it has no sandboxes"}
    pool: Executor

    def stop(self) -> None:
        """Ends the pool."""
        self.pool.shutdown()

    def functions(self, count: int) -> None:
        """One Future each."""
        done(self.pool.submit(work.noop, i) for i in range(count))

    def chunks(self, count: int) -> None:
        """`map` in chunks."""
        for _ in self.pool.map(work.noop, range(count),
                               chunksize=max(1, count // (4 * self.cores))):
            pass

    def commands(self, count: int) -> None:
        """A function that runs the program, one Future each."""
        done(self.pool.submit(work.true, i) for i in range(count))

    def one(self) -> None:
        """One function."""
        self.pool.submit(work.noop, 1).result()


class ProcessPool(Pool):
    """The standard library's pool on one machine: no scheduler. It is the floor, not a peer."""

    name = "ProcessPool"
    schedules = False

    def start(self) -> None:
        """Starts the pool; its processes start with the first functions."""
        self.pool = ProcessPoolExecutor(self.cores)


class MpiFutures(Pool):
    """Started by `mpiexec -n CORES+1 python -m mpi4py.futures`, the way that needs no spawn."""

    name = "mpi4py.futures"
    packages = ("mpi4py", "mpich")

    @classmethod
    def command(cls, argv: list[str], cores: int) -> list[str]:
        """mpiexec before it."""
        return [str(Path(sys.executable).with_name("mpiexec")), "-n", str(cores + 1), argv[0],
                "-m", "mpi4py.futures", *argv[1:]]

    def start(self) -> None:
        """The workers are the other ranks."""
        from mpi4py.futures import MPIPoolExecutor
        self.pool = MPIPoolExecutor()


class ExecutorLib(Pool):
    """`SingleNodeExecutor` with block allocation: persistent workers. Without block allocation,
    which core counts need, each call starts a Python process."""

    name = "executorlib"
    packages = ("executorlib",)
    lacks = {**Pool.lacks, "mixed": "with persistent workers all tasks have the same cores; else "
                                    "each task starts a Python process, about 8 a second"}

    def start(self) -> None:
        """Starts the workers."""
        from executorlib import SingleNodeExecutor
        os.chdir(self.folder)
        self.pool = SingleNodeExecutor(max_workers=self.cores, block_allocation=True)
