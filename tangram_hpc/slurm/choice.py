"""Chooses a broker's Slurm adapter: `cli`, `pyslurm`, or `auto`.

`auto` uses pyslurm where it is installed and answers, and Slurm's commands otherwise. Whether
pyslurm is installed is looked up without importing it; whether it works shows when it first
answers.
"""

from __future__ import annotations

import importlib.util
import random
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from ..domain.slurm import JobOrder, JobRef, JobView
from ..errors import MissingExtra, how_to_install
from ..ports import Clock
from .adapter import SlurmAdapter
from .binding import Pyslurm, PyslurmUnusable
from .budget import Budget, RpcLimits
from .budgeted import BudgetedSlurm
from .commands import DEADLINE_S, Commands

_T = TypeVar("_T")


def make_adapter(choice: str, environ: Mapping[str, str], deadline_s: float = DEADLINE_S
                 ) -> SlurmAdapter:
    """Returns the adapter of this name.

    Args:
        choice: "cli", "pyslurm" or "auto".
        environ: the caller's environment.
        deadline_s: how long one call may take, seconds.

    Raises:
        MissingExtra: pyslurm was asked for and is not installed.
    """
    there = importlib.util.find_spec("pyslurm") is not None
    if choice == "pyslurm" and not there:
        raise MissingExtra("config field `slurm`: pyslurm is not installed: "
                           f"{how_to_install('pyslurm')} with the site's release of it, or slurm = "
                           "\"cli\"")
    if choice == "pyslurm":
        return Pyslurm(environ, deadline_s)
    if choice == "auto" and there:
        return Auto(Pyslurm(environ, deadline_s), Commands(environ, deadline_s))
    return Commands(environ, deadline_s)


def make_slurm(choice: str, environ: Mapping[str, str], job: str, query_s: float, clock: Clock
               ) -> BudgetedSlurm:
    """Returns a broker's Slurm port.

    Args:
        choice: as for `make_adapter`.
        environ: the broker's environment.
        job: the job's name, which seeds the jitter of pauses.
        query_s: least time between two queries, seconds.
        clock: the broker's clock.

    Raises:
        MissingExtra: pyslurm was asked for and is not installed.
    """
    limits = RpcLimits(query_ns=int(query_s * 1e9))
    dice = random.Random(zlib.crc32(job.encode()))
    return BudgetedSlurm(make_adapter(choice, environ), Budget(dice.uniform, limits), clock)


class Auto:
    """Uses the first of two adapters until that raises PyslurmUnusable, and then the second."""

    def __init__(self, first: SlurmAdapter, second: SlurmAdapter) -> None:
        self._now, self._second = first, second

    @property
    def name(self) -> str:
        """The name of the adapter in use."""
        return self._now.name

    async def submit(self, order: JobOrder) -> int:
        """Submits through the adapter in use; see `adapter.SlurmAdapter.submit`."""
        return await self._either(lambda adapter: adapter.submit(order))

    async def query(self, jobs: Sequence[int], names: Sequence[str]) -> tuple[JobView, ...]:
        """Queries through the adapter in use; see `adapter.SlurmAdapter.query`."""
        return await self._either(lambda adapter: adapter.query(jobs, names))

    async def cancel(self, jobs: Sequence[JobRef]) -> None:
        """Cancels through the adapter in use; see `adapter.SlurmAdapter.cancel`."""
        await self._either(lambda adapter: adapter.cancel(jobs))

    async def comment(self, job: int, text: str) -> None:
        """Sets a Comment through the adapter in use; see `adapter.SlurmAdapter.comment`."""
        await self._either(lambda adapter: adapter.comment(job, text))

    async def close(self) -> None:
        """Closes the adapter in use; see `adapter.SlurmAdapter.close`."""
        await self._now.close()

    async def _either(self, call: Callable[[SlurmAdapter], Awaitable[_T]]) -> _T:
        try:
            return await call(self._now)
        except PyslurmUnusable:
            await self._now.close()
            self._now = self._second
            return await call(self._now)
