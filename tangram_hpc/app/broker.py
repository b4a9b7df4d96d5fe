"""A broker put together, from its config to its end. Law: see the package's."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..broker.broker_settings import Settings
from ..broker.driver import Broker
from ..broker.satellites import SatelliteScripts
from ..config.endpoints import endpoint_spec
from ..config.rollouts import rollouts_spec
from ..config.services import service_spec
from ..config.settings import Config
from ..domain.allocation import AllocPolicy
from ..domain.service import EndpointSpec
from ..errors import InvalidInput, TangramError
from ..scheduler.placement.placers.placer_registry import make_placer
from ..scheduler.scheduler import Scheduler
from ..slurm.budgeted import BudgetedSlurm
from ..slurm.choice import make_slurm
from ..slurm.job_environment import slurm_place
from ..storage.access import Access, mark_ended, write_access
from ..storage.cmlfq_file import TreeFiles
from ..storage.folder_lock import HEARTBEAT_S, FolderLock
from ..storage.journal import FileJournal, journals, next_journal, read_journals
from ..storage.rundir import make_scratch
from ..storage.spill_files import FolderSpillFiles
from ..storage.spool import FileSpool
from ..storage.store import TEMPORARY_S, FolderStore
from ..transport.socket.asyncsock import Listener, SocketLink, listen_tcp, listen_unix
from ..version import VERSION
from .connecting import own_addresses
from .folder import take_folder
from .job_comment import set_job_comment
from .loop import LoopTimer, die_on_broken_law, seldom_collect, watch_lifeline
from .system_clock import SystemClock

_GAP_S = 0.002  # of a busy broker or worker, see there


@dataclass(frozen=True)
class BrokerPlan:
    """What `serve_broker` starts: the job, how many workers it waits for, and who holds its life
    (`lifeline`: a pipe whose end ends it, -1 for none). `policy` and `scripts`: which satellites it
    may ask for, and how they are submitted."""

    job: str
    nodes: int
    config: Config
    lifeline: int = -1
    policy: AllocPolicy | None = None
    scripts: SatelliteScripts | None = None


async def serve_broker(plan: BrokerPlan, environ: Mapping[str, str]) -> None:
    """Runs a broker until it is told to end; leaves the journal and a tombstone of its access.
    SIGUSR1 drains it: nothing more is lent, and SIGTERM then waits a while for what still runs."""
    loop, config = asyncio.get_running_loop(), plan.config
    endpoints = tuple(endpoint_spec(name, table) for name, table in config.endpoints.items())
    seldom_collect()
    die_on_broken_law(loop, "broker")
    folder_lock = await take_folder(environ, plan.job)
    folder = folder_lock.folder
    scheduler = Scheduler(make_placer(config.placer), round(config.end_margin_s * 1e9))
    _apply_earlier(scheduler, folder)
    spool = FileSpool(folder / "once", config.once_mib << 20)
    ended = asyncio.Event()
    journal = FileJournal(next_journal(folder), config.sync, loop.call_soon_threadsafe, spool.sync,
                          folder_lock.superseded)
    settings = _settings(plan, folder, endpoints)
    place, clock = slurm_place(environ), SystemClock()
    held = place is not None and place.job == plan.job  # else it is a guest in somebody's job
    slurm = make_slurm(config.slurm, environ, plan.job, config.slurm_query_s, clock) if (
        held) else None
    spill = FolderSpillFiles(folder / "overflow")
    broker = Broker(scheduler, journal, clock, LoopTimer(loop), settings, ended.set, spool, slurm,
                    plan.scripts, TreeFiles(plan.job), spill, _sweeper(loop, settings.store))
    key = os.urandom(32)
    scratch, sockets, addresses = _open_ways(plan, environ)
    listeners = [Listener(sock, key, plan.job, lambda link: _converse(broker, link))
                 for sock in sockets]
    try:
        broker.start()
    except InvalidInput:  # of the config file's pools
        for listener in listeners:
            listener.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    access = folder / "access.json"
    _check_place(folder_lock, plan.job)
    write_access(access, Access(plan.job, tuple(addresses), key, settings.store,
                                socket.gethostname(), os.getpid()))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, broker.end, f"signal {number.name}",
                                config.end_margin_s / 4)
    loop.add_signal_handler(signal.SIGUSR1, broker.drain, "the job is about to end")
    _hold(LoopTimer(loop), folder_lock, broker)
    if plan.lifeline >= 0:
        watch_lifeline(loop, plan.lifeline, lambda: broker.stop("its parent ended"))
    await ended.wait()
    for listener in listeners:
        listener.close()
    try:
        _check_place(folder_lock, plan.job)  # else nothing in the folder is ours any more
    except TangramError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    if broker.over or not spool.names():  # else the job may be requeued, and go on with them
        shutil.rmtree(folder / "store", ignore_errors=True)
    spill.close()
    spool.close(remove=broker.over)
    mark_ended(access, plan.job, time.strftime("%Y-%m-%dT%H:%M:%S"))
    # from here on nothing is written to the folder or removed from it: the next broker may begin
    folder_lock.file_lock.release()
    await asyncio.sleep(0.05)  # the last frames leave
    if slurm is not None:
        await _leave_slurm(slurm, broker, plan, folder)


async def _leave_slurm(slurm: BudgetedSlurm, broker: Broker, plan: BrokerPlan,
                       folder: Path) -> None:
    """Waits until the satellites are cancelled, leaves the job's summary, and closes the port."""
    for _ in range(100):
        if not broker.satellites.cancelling:
            break
        await asyncio.sleep(0.1)
    if plan.config.job_comment and plan.job.isdigit() and (
            why := await set_job_comment(slurm, int(plan.job), folder)):
        print(f"tangram: broker: no summary in the job's Comment: {why}", file=sys.stderr)
    await slurm.closed()


def _check_place(folder_lock: FolderLock, job: str) -> None:
    """Raises TangramError where another broker has taken this one's place; says who it is."""
    if folder_lock.superseded(now=True):
        raise TangramError(f"job {job}: another broker serves it now ({folder_lock.successor()}); "
                           "this one has stopped and answers nobody")


def _hold(timer: LoopTimer, folder_lock: FolderLock, broker: Broker) -> None:
    """Shows every `HEARTBEAT_S` that this broker lives, and checks whether it was superseded while
    it had nothing to commit."""
    folder_lock.heartbeat()
    if not broker.superseded() and not broker.ended:
        timer.after(HEARTBEAT_S, lambda: _hold(timer, folder_lock, broker))


def _settings(plan: BrokerPlan, folder: Path, endpoints: tuple[EndpointSpec, ...]) -> Settings:
    """The broker's settings, from its plan and the config."""
    config = plan.config
    return Settings(
        job=plan.job, store=str(folder / "store"), nodes=plan.nodes, grace_s=config.grace_s,
        join_s=config.join_s, kill_wait_s=config.kill_wait_s, output_max=config.output_max,
        user=getpass.getuser(), version=VERSION, gap_s=_GAP_S, policy=plan.policy,
        endpoints=endpoints, slurm_query_s=config.slurm_query_s,
        services=tuple(service_spec(name, told) for name, told in config.services.items()),
        rollouts=tuple(rollouts_spec(name, told) for name, told in config.rollouts.items()))


def _sweeper(loop: asyncio.AbstractEventLoop, folder: str) -> Callable[[list[str]], None]:
    """Removes owners' entries of the job's store, in a thread: it may be on a slow file system.
    Temporary files that were left there go now, and every TEMPORARY_S."""
    store = FolderStore(folder)

    def sweep_temporary() -> None:
        loop.run_in_executor(None, store.sweep_temporary)
        loop.call_later(TEMPORARY_S, sweep_temporary)

    sweep_temporary()

    def sweep(owners: list[str]) -> None:
        loop.run_in_executor(None, store.sweep, owners)

    return sweep


def _apply_earlier(scheduler: Scheduler, folder: Path) -> None:
    """Gives a scheduler the events of earlier starts of this job's broker; a replay never plans.

    Raises:
        InvalidInput: a journal is damaged, or of a release that understood it differently.
    """
    try:
        for event in read_journals(folder) if journals(folder) else ():
            scheduler.handle(event)
    except (AssertionError, KeyError) as error:
        raise InvalidInput(f"journal of an earlier start in {folder}: this release cannot apply "
                           f"it ({error!r:.200}); move the folder away to begin anew") from None


def _converse(broker: Broker, link: SocketLink) -> None:
    peer = broker.accept(link)
    link.attach(lambda parcel: broker.receive(peer, *parcel), lambda: broker.room(peer),
                lambda reason: broker.lost(peer, reason))


def _open_ways(plan: BrokerPlan, environ: Mapping[str, str]
               ) -> tuple[Path, list[socket.socket], list[str]]:
    """A scratch folder, the sockets that are listened on, and their addresses; nothing of it stays
    where one cannot be had.

    Raises:
        InvalidInput: names the field.
    """
    config, embedded = plan.config, plan.lifeline >= 0  # a LocalCluster's workers are all here
    scratch = make_scratch(environ, config.scratch, "broker")
    sockets, addresses = [], [f"unix:{scratch / 'broker.sock'}"]
    try:
        sockets.append(_listen_unix(scratch / "broker.sock"))
        if (own := own_addresses(config.bind, {} if embedded else environ,
                                 plan.scripts is not None)) is not None:
            sockets.append(_listen_tcp(own.listen))
            host = f"[{own.advertised}]" if ":" in own.advertised else own.advertised
            addresses.append(f"tcp:{host}:{sockets[-1].getsockname()[1]}")
    except InvalidInput:
        for sock in sockets:
            sock.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return scratch, sockets, addresses


def _listen_unix(path: Path) -> socket.socket:
    try:
        return listen_unix(str(path))
    except OSError as error:
        raise InvalidInput(f"scratch {path.parent.parent}: no socket can be made there "
                           f"({error.strerror or error}); set `scratch` to a node-local folder "
                           "with a short name") from None


def _listen_tcp(address: str) -> socket.socket:
    try:
        return listen_tcp(address)
    except OSError as error:
        raise InvalidInput(f"config field `bind`: cannot listen on {address} "
                           f"({error.strerror})") from None
