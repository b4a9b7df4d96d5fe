"""The meeting of all ranks of one MPI world; the only importer of mpi4py.

A job may start its trainers and one gateway as one MPI world. All ranks meet once, in `meet`: each
tells the others its role and version (a `RankCard`), every rank checks all cards in the same way,
and the world is split so that trainers have a communicator of their own (`mpi_world.py`). If the
ranks do not fit together, all of them raise the same error.

mpi4py is imported inside functions, because importing it starts MPI. The start is watched by a
child process (`mpi_watchdog.py`), since MPI_Init waits for ever for a rank that never comes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...errors import (
    InvalidInput,
    MissingExtra,
    TangramError,
    WrongWorld,
    how_to_install,
)
from ...slurm.job_environment import step_marks
from .mpi_exit import note_exit_status, one_line_hook, refuse
from .mpi_launch import REMEDY, Launch, launch_of, launch_rank
from .mpi_oversubscription import oversubscribed, shares_fate, wait_environment
from .mpi_shm import forget_names
from .mpi_watchdog import start_watchdog
from .mpi_world import MpiWorld
from .rank_card import RankCard, complaint

_SLOT = 8192  # bytes for the card of one rank in the meeting

_met: MpiWorld | None = None  # the world of this process; None before the meeting


def trainers() -> Any:
    """Returns the trainers' own communicator (`tangram_hpc.comm`).

    Raises:
        WrongWorld: `connect()` has not met a gateway in this process.
    """
    if _met is not None and _met.forked:
        raise WrongWorld("tangram_hpc.comm: this process is a fork of an MPI rank, and MPI is that "
                         "rank's alone")
    if _met is None:
        raise WrongWorld("tangram_hpc.comm: there is none before connect() has met a gateway; "
                         "in a world without one use mpi4py.MPI.COMM_WORLD")
    return _met.trainers


def launched(environ: Mapping[str, str]) -> Launch:
    """Returns the launcher's description of our world; see `mpi_launch.launch_of`."""
    return launch_of(environ)


def meet(environ: Mapping[str, str], card: RankCard) -> MpiWorld:
    """Starts MPI and meets all ranks. Collective over the world; a second call returns the world.

    Args:
        environ: the environment, from which the launched world is known.
        card: what this rank tells the others.

    Raises:
        WrongWorld: the world is not the one that was launched, or has not exactly one gateway.
        AccessError: the gateway cannot serve.
        ProtocolError: the ranks have different versions of tangram_hpc.
        MissingExtra: mpi4py is not installed.
    """
    if _met is not None:
        return _met
    sys.excepthook = one_line_hook(sys.excepthook, speaks(environ))
    try:
        return _bring_together(environ, card)
    except TangramError as error:
        refuse(error)
        raise


def speaks(environ: Mapping[str, str]) -> bool:
    """Returns whether this rank is the one that reports an error of all ranks."""
    return launch_rank(environ) == 0


def _bring_together(environ: Mapping[str, str], card: RankCard) -> MpiWorld:
    global _met
    launch = launch_of(environ)
    is_shared = oversubscribed(environ, len(os.sched_getaffinity(0)), os.cpu_count() or 1)
    os.environ.update(wait_environment(environ, is_shared))  # MPI reads it when it starts
    with start_watchdog(os.getpid(), launch.rank, launch.timeout_s, REMEDY, step_marks(environ)):
        MPI, own_finalize = _start()
        full = {**asdict(card), "size": launch.size, "source": launch.source,
                "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE, "library": _library(MPI)}
        cards = _exchange(MPI, RankCard(**full))
        forget_names()  # every card has come, so every rank has left MPI_Init
        problem = complaint(cards)
        if problem is None:
            _met = MpiWorld(MPI, cards, own_finalize, is_shared, shares_fate(environ))
    if problem is not None:
        if own_finalize:
            MPI.Finalize()  # it returns, as all ranks call it; the launcher sees an orderly end
        raise problem
    assert _met is not None
    if card.role == "trainer":
        _met.stay()
        note_exit_status()
    return _met


def _start() -> tuple[Any, bool]:
    """Starts MPI; returns mpi4py's module, and whether we must finalise MPI."""
    ours = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if ours:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingExtra(f"TANGRAM_GATEWAY is set, but mpi4py cannot be used ({error}); "
                           f"{how_to_install('mpi')}, or unset it to use the socket") from None
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI, ours or mpi4py.rc.finalize is False


def _library(MPI: Any) -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _exchange(MPI: Any, card: RankCard) -> list[RankCard]:
    text = json.dumps(asdict(card)).encode()
    if len(text) > _SLOT:
        raise InvalidInput(f"the path of the access file is too long for MPI: {card.access[:80]}…")
    world = MPI.COMM_WORLD
    gathered = bytearray(_SLOT * world.size)
    world.Allgather([bytearray(text.ljust(_SLOT)), MPI.BYTE], [gathered, MPI.BYTE])
    slots = (gathered[at : at + _SLOT] for at in range(0, len(gathered), _SLOT))
    return [RankCard(**json.loads(slot)) for slot in slots]
