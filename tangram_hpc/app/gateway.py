"""Puts a gateway together and runs it in its rank of the MPI world.

Every error is told to all ranks when the world meets, so that each of them ends with the same line.

For each rank's connection the access file is read anew, since a broker that was started again has
another key and mostly other addresses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path

from ..config.settings import Config
from ..errors import BrokerUnreachable, TangramError
from ..gateway.driver import Gateway
from ..gateway.watchdog import STUCK_S, watch
from ..protocol.relay import STOPPED_S
from ..transport.mpi.mpi_oversubscription import shares_fate
from ..transport.mpi.mpi_watchdog import continue_if_stopped
from ..transport.mpi.rank_card import RankCard
from ..transport.mpi.timer_slack import shorten_timer_slack
from ..transport.pipes import SocketPipes
from ..version import VERSION
from .access_dial import AccessFileDialer
from .broker_location import await_access, find_access

_LEAVE_S = 30.0  # how long ranks may take to leave after the grace of a lost broker is over


def serve_gateway(config: Config, environ: Mapping[str, str], access: str | Path | None = None,
                  job: str = "") -> int:
    """Runs this rank as the gateway of its MPI world until all trainers have left it; returns the
    exit status. It waits for an access file that is not written yet.

    Raises:
        WrongWorld: the MPI world is not the one that was launched.
        AccessError: no broker can be found.
        BrokerUnreachable: the broker went away for good.
    """
    # Where the launcher ends all ranks together, ending a stuck gateway would end their work.
    may_kill = not shares_fate(environ)
    alive = continue_if_stopped(os.getpid(), STOPPED_S, may_kill)
    from ..transport.mpi import mpi

    known, path, problem = None, "", ""
    try:
        patience = mpi.launched(environ).timeout_s * 0.8
        try:
            path = str(Path(access) if access is not None else find_access(environ, job))
            known = await_access(Path(path), patience)
        except TangramError as error:
            problem = str(error)
        job_served = known.job if known is not None else ""
        world = mpi.meet(environ, RankCard("gateway", VERSION, job_served, path, problem))
    except TangramError as error:
        if mpi.speaks(environ):
            raise
        return error.exit_status  # rank 0 prints the error for all ranks
    assert known is not None  # without an access file, `meet` has raised
    gateway = Gateway(world.wire, SocketPipes(AccessFileDialer(Path(path)).dial), world.members,
                      time.monotonic_ns, world.spin_us(config.gateway_spin_us), os.sched_yield,
                      world.shares_fate, config.grace_s + _LEAVE_S)
    shorten_timer_slack()
    watch(lambda: None if gateway.over else gateway.turns, STUCK_S if may_kill else inf, alive)
    orderly = gateway.run()
    world.finalize(orderly)
    if gateway.abandoned:
        raise BrokerUnreachable(f"the gateway ends: job {known.job}: {gateway.abandoned}")
    return 0
