"""Puts a broker together and serves one job, from its config to its end.

It takes the job's folder, loads the last checkpoint, replays the events since, opens the sockets,
writes the access files and runs the driver until it ends. Only the broker that holds the folder's
lock writes there or removes files; after the lock is released, the folder is only read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...broker.broker_settings import Settings
from ...broker.driver import Broker
from ...broker.satellites import SatelliteScripts
from ...config.endpoints import endpoint_spec
from ...config.rollouts import rollouts_spec
from ...config.services import service_spec
from ...config.settings import Config
from ...config.tenants import tenant_spec
from ...config.user_name import user_name
from ...domain.allocation import AllocPolicy
from ...domain.service import EndpointSpec
from ...errors import InvalidInput, TangramError
from ...protocol.frame import BUSY_GAP_S
from ...scheduler.placement.placers.placer_registry import make_placer
from ...scheduler.scheduler import Scheduler
from ...slurm.budgeted import BudgetedSlurm
from ...slurm.choice import make_slurm
from ...slurm.job_environment import job_account, slurm_place
from ...storage.access import NAME as ACCESS
from ...storage.access import Access, mark_ended, renew_access, worker_file, write_access
from ...storage.checkpoint import Checkpoints
from ...storage.cmlfq_file import TreeFiles
from ...storage.folder_lock import FolderLock
from ...storage.journal import FileJournal
from ...storage.journal_segments import begin_next
from ...storage.rundir import tangram_home
from ...storage.secrets_file import NAME as SECRETS
from ...storage.spill_files import FolderSpillFiles
from ...storage.spool import FileSpool
from ...storage.store import TEMPORARY_S, FolderStore
from ...version import VERSION
from ..folder import take_folder
from ..loop import LoopTimer, die_on_broken_law, seldom_collect, watch_lifeline
from ..system_clock import SystemClock
from .broker_sockets import BrokerSockets
from .earlier_starts import EarlierStarts, apply_earlier
from .job_comment import set_job_comment
from .missing_workers import MissingWorkers
from .watches import await_workers, check_place, hold

LATE_S = 10.0  # a sign of life that is so much older than the grace may still be the last one


@dataclass(frozen=True)
class BrokerPlan:
    """What `serve_broker` is to start.

    Attributes:
        job: the job's name or Slurm id.
        nodes: for how many workers the broker waits before it calls the nodes complete.
        config: the settings.
        lifeline: the reading end of a pipe; the broker ends when its writing end is closed. -1:
            none.
        policy: which satellites the broker may ask for; None for none.
        scripts: makes the batch scripts of satellites; None where the job may have no satellites.
        workers_live: whether workers of an earlier start of this broker may live on although the
            broker is embedded.
        supervised: whether its parent starts the broker again when it has crashed.
    """

    job: str
    nodes: int
    config: Config
    lifeline: int = -1
    policy: AllocPolicy | None = None
    scripts: SatelliteScripts | None = None
    workers_live: bool = False
    supervised: bool = False


async def serve_broker(plan: BrokerPlan, environ: Mapping[str, str]) -> None:
    """Runs a broker until it is told to end.

    The journal stays, and so does the access file, which then says that the broker has ended.

    SIGUSR1 drains the broker: nothing more is lent, and SIGTERM then waits a while for the actions
    that still run.

    Raises:
        InvalidInput: a setting or an earlier journal is wrong, or a folder cannot be written.
        TangramError: another broker serves the job.
    """
    loop, config = asyncio.get_running_loop(), plan.config
    endpoints = tuple(endpoint_spec(name, table) for name, table in config.endpoints.items())
    seldom_collect()
    die_on_broken_law(loop, "broker")
    folder_lock, granted_at = await take_folder(environ, plan.job)
    scheduler = Scheduler(make_placer(config.placer), round(config.end_margin_s * 1e9))
    earlier = apply_earlier(scheduler, folder_lock)
    files = _open_files(config, folder_lock, earlier)
    settings = _settings(plan, folder_lock, endpoints, earlier.down_s, granted_at,
                         job_account(environ))
    clock, timer, ended = SystemClock(), LoopTimer(loop), asyncio.Event()
    slurm = _slurm_of(plan, environ, clock)
    broker = Broker(scheduler, files.journal, clock, timer, settings, ended.set, files.spool, slurm,
                    plan.scripts, TreeFiles(plan.job), files.spill,
                    _sweeper(loop, settings.store, ended), files.checkpoints.look)
    sockets = BrokerSockets(broker, config, environ, plan.lifeline >= 0, plan.scripts is not None)
    die_on_broken_law(loop, "broker", lambda why: _say_last(why, broker, sockets),
                      f"TANGRAM_HOME {tangram_home(environ)}")
    try:
        broker.start()
    except InvalidInput:  # a rollout pool of the settings file is wrong
        sockets.close()
        raise
    _end_on_signals(loop, plan, broker)  # first: others may end it once they know of it
    _tell_others(plan, broker, sockets, folder_lock, timer)
    missing = MissingWorkers(plan.job, config.no_worker_s, slurm is not None)
    await_workers(timer, broker, missing, slurm)
    await ended.wait()
    sockets.close()
    files.checkpoints.close()
    _leave_folder(folder_lock, plan.job, broker.over, files)
    await asyncio.sleep(0.05)  # the sockets send the last frames
    if slurm is not None:
        await _leave_slurm(slurm, broker, plan, folder_lock.folder)
    if missing.gave_up:
        raise TangramError(f"job {plan.job}: {missing.gave_up}")


def _say_last(why: str, broker: Broker, sockets: BrokerSockets) -> None:
    """Tells all peers why this broker ends at once, and leaves nothing in the node's scratch."""
    broker.say_last(why)
    sockets.close()


class _Files(NamedTuple):
    """What a broker writes in its job's folder."""

    journal: FileJournal
    checkpoints: Checkpoints
    spool: FileSpool
    spill: FolderSpillFiles


def _open_files(config: Config, folder_lock: FolderLock, earlier: EarlierStarts) -> _Files:
    """Opens the files that a broker writes, and begins its segment of the journal."""
    folder, loop = folder_lock.folder, asyncio.get_running_loop()
    spool = FileSpool(folder / "once", config.once_mib << 20)
    journal = FileJournal(begin_next(folder, earlier.head), config.sync, loop.call_soon_threadsafe,
                          spool.sync, folder_lock.superseded)
    checkpoints = Checkpoints(folder, journal, earlier.head, earlier.kept, earlier.replayed)
    return _Files(journal, checkpoints, spool, FolderSpillFiles(folder / "overflow"))


def _tell_others(plan: BrokerPlan, broker: Broker, sockets: BrokerSockets,
                 folder_lock: FolderLock, timer: LoopTimer) -> None:
    """Writes the access files, and from now on renews them and the broker's sign of life."""
    path = folder_lock.folder / ACCESS
    access = Access(plan.job, sockets.addresses, sockets.key, broker.settings.store,
                    socket.gethostname(), os.getpid(),
                    plan.config.grace_s if plan.supervised else 0.0, folder_lock.epoch)
    check_place(folder_lock, plan.job)
    files = {worker_file(path): replace(access, key=sockets.worker_key), path: access}
    for file, content in files.items():  # the clients' file is last: then both are there
        write_access(file, content)

    def renew() -> None:
        for file, content in files.items():
            renew_access(file, content)

    hold(timer, folder_lock, broker, renew)


def _leave_folder(folder_lock: FolderLock, job: str, over: bool, files: _Files) -> None:
    """Removes what the next broker of the job does not need, and lets it begin.

    Args:
        over: whether the job is over, so that kept results are no longer needed.
    """
    folder = folder_lock.folder
    check_place(folder_lock, job)  # a broker that has lost its folder may remove nothing
    if over or not files.spool.names():  # a requeued job needs the kept results and the store
        shutil.rmtree(folder / "store", ignore_errors=True)
        (folder / SECRETS).unlink(missing_ok=True)
    files.spill.close()
    files.spool.close(remove=over)
    mark_ended(folder / ACCESS, job, time.strftime("%Y-%m-%dT%H:%M:%S"), folder_lock.epoch)
    # from here on nothing is written to the folder or removed from it: the next broker may begin
    folder_lock.file_lock.release()


def _slurm_of(plan: BrokerPlan, environ: Mapping[str, str], clock: SystemClock
              ) -> BudgetedSlurm | None:
    """Returns the Slurm port of the broker's own job.

    It is None for a broker outside of Slurm, or with a name of its own inside another job.
    """
    place, config = slurm_place(environ), plan.config
    if place is None or place.job != plan.job:
        return None
    return make_slurm(config.slurm, environ, plan.job, config.slurm_query_s, clock)


def _end_on_signals(loop: asyncio.AbstractEventLoop, plan: BrokerPlan, broker: Broker) -> None:
    """Lets signals, and the end of the parent that holds the lifeline, drain or end the broker."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, broker.end, f"signal {number.name}",
                                plan.config.end_margin_s / 4)
    loop.add_signal_handler(signal.SIGUSR1, broker.drain, "the job is about to end")
    if plan.lifeline >= 0:
        watch_lifeline(loop, plan.lifeline, lambda: broker.stop("its parent ended"))


async def _leave_slurm(slurm: BudgetedSlurm, broker: Broker, plan: BrokerPlan,
                       folder: Path) -> None:
    """Waits until the satellites are cancelled, writes the job's summary, and closes the Slurm
    port.
    """
    for _ in range(100):
        if not broker.satellites.cancelling:
            break
        await asyncio.sleep(0.1)
    if plan.config.job_comment and plan.job.isdigit() and (
            why := await set_job_comment(slurm, int(plan.job), folder)):
        print(f"tangram: broker: no summary in the job's Comment: {why}", file=sys.stderr)
    await slurm.closed()


def _settings(plan: BrokerPlan, folder_lock: FolderLock, endpoints: tuple[EndpointSpec, ...],
              down_s: float, granted_at: int, account: str) -> Settings:
    """Returns the broker's settings. A broker that was away for `down_s` seconds waits for the
    workers and clients of the one before it, which give up after `grace_s`.
    """
    config = plan.config
    waits = 0 <= down_s < config.grace_s + LATE_S and (plan.workers_live or plan.lifeline < 0)
    return Settings(
        job=plan.job, store=str(folder_lock.folder / "store"), nodes=plan.nodes,
        epoch=folder_lock.epoch, grace_s=config.grace_s, join_s=config.join_s,
        kill_wait_s=config.kill_wait_s, output_max=config.output_max,
        output_bound=config.output_bound, user=user_name(), version=VERSION,
        gap_s=BUSY_GAP_S, policy=plan.policy, granted_at=granted_at, account=account,
        endpoints=endpoints, slurm_query_s=config.slurm_query_s,
        rejoin_s=config.grace_s if waits else 0.0, down_s=down_s if waits else 0.0,
        services=tuple(service_spec(name, told) for name, told in config.services.items()),
        rollouts=tuple(rollouts_spec(name, told) for name, told in config.rollouts.items()),
        tenants=tuple(tenant_spec(name, told) for name, told in config.tenants.items()))


def _sweeper(loop: asyncio.AbstractEventLoop, folder: str, ended: asyncio.Event
             ) -> Callable[[list[str]], None]:
    """Returns a function that removes owners' entries from the job's store.

    From now on, temporary files whose writers are gone are removed from the store as well.

    Temporary files are searched now and every TEMPORARY_S until the broker has ended, because a
    writer may be killed at any time. Both removals run in threads, as the store may be on a slow
    file system.
    """
    store = FolderStore(folder)

    def sweep_temporary() -> None:
        if not ended.is_set():  # afterwards the folder may belong to the next broker
            loop.run_in_executor(None, store.sweep_temporary)
            loop.call_later(TEMPORARY_S, sweep_temporary)

    sweep_temporary()

    def sweep(owners: list[str]) -> None:
        loop.run_in_executor(None, store.sweep, owners)

    return sweep


