"""Puts a broker together and serves one job, from its config to its end.

It takes the job's folder, loads the last checkpoint, replays the events since, opens the sockets,
writes the access file and runs the driver until it ends. Only the broker that holds the folder's
lock writes there or removes files; after the lock is released, the folder is only read.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..broker.broker_settings import Settings
from ..broker.driver import Broker
from ..broker.satellites import SatelliteScripts
from ..config.endpoints import endpoint_spec
from ..config.rollouts import rollouts_spec
from ..config.services import service_spec
from ..config.settings import Config
from ..domain.allocation import AllocPolicy
from ..domain.event import BrokerStopped
from ..domain.service import EndpointSpec
from ..domain.slurm import JobView
from ..errors import InvalidInput, TangramError
from ..ports import SlurmFailure
from ..protocol.frame import BUSY_GAP_S
from ..scheduler.placement.placers.placer_registry import make_placer
from ..scheduler.scheduler import Scheduler
from ..slurm.budgeted import BudgetedSlurm
from ..slurm.choice import make_slurm
from ..slurm.job_environment import slurm_place
from ..storage.access import NAME as ACCESS
from ..storage.access import Access, mark_ended, renew_access, write_access
from ..storage.checkpoint import Checkpoints, load
from ..storage.cmlfq_file import TreeFiles
from ..storage.folder_lock import HEARTBEAT_S, FolderLock
from ..storage.journal import FileJournal
from ..storage.journal_format import SegmentHead
from ..storage.journal_segments import JobJournal, begin_next
from ..storage.rundir import make_scratch
from ..storage.secrets_file import NAME as SECRETS
from ..storage.spill_files import FolderSpillFiles
from ..storage.spool import FileSpool
from ..storage.store import TEMPORARY_S, FolderStore
from ..transport.socket.asyncsock import Listener, SocketLink, listen_tcp, listen_unix
from ..transport.socket.certificate import Certificate, address_of, certificate_for
from ..version import VERSION
from .broker_location import own_addresses
from .folder import take_folder
from .job_comment import set_job_comment
from .loop import LoopTimer, die_on_broken_law, seldom_collect, watch_lifeline
from .missing_workers import MissingWorkers
from .system_clock import SystemClock

_LATE_S = 10.0  # a sign of life that is so much older than the grace may still be the last one


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
    folder_lock = await take_folder(environ, plan.job)
    folder, ended = folder_lock.folder, asyncio.Event()
    scheduler = Scheduler(make_placer(config.placer), round(config.end_margin_s * 1e9))
    earlier = _apply_earlier(scheduler, folder_lock)
    down_s = earlier.down_s
    spool = FileSpool(folder / "once", config.once_mib << 20)
    journal = FileJournal(begin_next(folder, earlier.head), config.sync, loop.call_soon_threadsafe,
                          spool.sync, folder_lock.superseded)
    checkpoints = Checkpoints(folder, journal, earlier.head, earlier.kept, earlier.replayed)
    settings = _settings(plan, folder_lock, endpoints, down_s)
    clock = SystemClock()
    slurm = _slurm_of(plan, environ, clock)
    spill = FolderSpillFiles(folder / "overflow")
    broker = Broker(scheduler, journal, clock, LoopTimer(loop), settings, ended.set, spool, slurm,
                    plan.scripts, TreeFiles(plan.job), spill, _sweeper(loop, settings.store, ended),
                    checkpoints.look)
    die_on_broken_law(loop, "broker", broker.say_last)
    key = os.urandom(32)
    scratch, ways = _open_ways(plan, environ)
    listeners = [Listener(way.sock, key, plan.job, lambda link: _converse(broker, link),
                          way.certificate) for way in ways]
    try:
        broker.start()
    except InvalidInput:  # a rollout pool of the settings file is wrong
        _stop_listening(listeners, scratch)
        raise
    path = folder / ACCESS
    access = Access(plan.job, tuple(way.address for way in ways), key, settings.store,
                    socket.gethostname(), os.getpid(), config.grace_s if plan.supervised else 0.0,
                    folder_lock.epoch)
    _check_place(folder_lock, plan.job)
    write_access(path, access)
    _end_on_signals(loop, plan, broker)
    missing = MissingWorkers(plan.job, config.no_worker_s, slurm is not None)
    _hold(LoopTimer(loop), folder_lock, broker, lambda: renew_access(path, access))
    _await_workers(LoopTimer(loop), broker, missing, slurm)
    await ended.wait()
    _stop_listening(listeners, scratch)
    checkpoints.close()
    _leave_folder(folder_lock, plan.job, broker.over, spool, spill)
    await asyncio.sleep(0.05)  # the sockets send the last frames
    if slurm is not None:
        await _leave_slurm(slurm, broker, plan, folder)
    if missing.gave_up:
        raise TangramError(f"job {plan.job}: {missing.gave_up}")


def _leave_folder(folder_lock: FolderLock, job: str, over: bool, spool: FileSpool,
                  spill: FolderSpillFiles) -> None:
    """Removes what the next broker of the job does not need, and lets it begin.

    Args:
        over: whether the job is over, so that kept results are no longer needed.
    """
    folder = folder_lock.folder
    _check_place(folder_lock, job)  # a broker that has lost its folder may remove nothing
    if over or not spool.names():  # a requeued job needs the kept results and the store
        shutil.rmtree(folder / "store", ignore_errors=True)
        (folder / SECRETS).unlink(missing_ok=True)
    spill.close()
    spool.close(remove=over)
    mark_ended(folder / ACCESS, job, time.strftime("%Y-%m-%dT%H:%M:%S"), folder_lock.epoch)
    # from here on nothing is written to the folder or removed from it: the next broker may begin
    folder_lock.file_lock.release()


def _stop_listening(listeners: Sequence[Listener], scratch: Path) -> None:
    """Closes the broker's sockets, and removes the folder of its Unix socket."""
    for listener in listeners:
        listener.close()
    shutil.rmtree(scratch, ignore_errors=True)


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


def _check_place(folder_lock: FolderLock, job: str) -> None:
    """Raises TangramError if another broker serves the job now; the message says which."""
    if folder_lock.superseded(now=True):
        raise TangramError(f"job {job}: another broker serves it now ({folder_lock.successor()}); "
                           "this one has stopped and answers nobody")


def _hold(timer: LoopTimer, folder_lock: FolderLock, broker: Broker,
          renew: Callable[[], None]) -> None:
    """Writes a heartbeat every `HEARTBEAT_S`, and checks whether another broker has taken over.

    Without this check, an idle broker would not notice another one. `renew` repairs the access file
    if a broker that this one has superseded has replaced it.
    """
    folder_lock.heartbeat()
    if not broker.superseded() and not broker.ended:
        renew()
        timer.after(HEARTBEAT_S, lambda: _hold(timer, folder_lock, broker, renew))


def _await_workers(timer: LoopTimer, broker: Broker, missing: MissingWorkers,
                   slurm: BudgetedSlurm | None) -> None:
    """Looks every `HEARTBEAT_S` whether the broker has workers; see `missing_workers.py`.

    A broker that may ask for satellites or give allocations back has no worker while it needs
    none, one that drains waits for none, and calls of endpoints need none.
    """
    ledger, job = broker.scheduler.ledger, broker.settings.job
    if broker.ended:
        return
    policy = ledger.allocs.policy
    needed = not (broker.draining or policy.max_nodes or policy.idle_ns or ledger.endpoints)
    line = missing.look(time.monotonic(), len(ledger.held_nodes()), needed)
    if line:
        print(f"tangram: broker: {line}", file=sys.stderr, flush=True)
    if missing.gave_up:
        return broker.stop(missing.gave_up)
    if slurm is not None and job.isdigit() and missing.take_question():
        slurm.query([int(job)], lambda answer: _end_with_job(broker, missing, answer))
    timer.after(HEARTBEAT_S, lambda: _await_workers(timer, broker, missing, slurm))


def _end_with_job(broker: Broker, missing: MissingWorkers,
                  answer: tuple[JobView, ...] | SlurmFailure) -> None:
    """Ends the broker if Slurm says that its job has ended. Workers may have joined meanwhile."""
    if broker.ended or not isinstance(answer, tuple) or broker.scheduler.ledger.held_nodes():
        return
    if missing.has_ended(answer):
        job = broker.settings.job
        print(f"tangram: broker: job {job} has ended, and the broker with it", file=sys.stderr,
              flush=True)
        broker.stop(f"Slurm job {job} has ended")


def _settings(plan: BrokerPlan, folder_lock: FolderLock, endpoints: tuple[EndpointSpec, ...],
              down_s: float) -> Settings:
    """Returns the broker's settings. A broker that was away for `down_s` seconds waits for the
    workers and clients of the one before it, which give up after `grace_s`.
    """
    config = plan.config
    waits = 0 <= down_s < config.grace_s + _LATE_S and (plan.workers_live or plan.lifeline < 0)
    return Settings(
        job=plan.job, store=str(folder_lock.folder / "store"), nodes=plan.nodes,
        epoch=folder_lock.epoch, grace_s=config.grace_s, join_s=config.join_s,
        kill_wait_s=config.kill_wait_s, output_max=config.output_max,
        output_bound=config.output_bound, user=getpass.getuser(), version=VERSION,
        gap_s=BUSY_GAP_S, policy=plan.policy,
        endpoints=endpoints, slurm_query_s=config.slurm_query_s,
        rejoin_s=config.grace_s if waits else 0.0, down_s=down_s if waits else 0.0,
        services=tuple(service_spec(name, told) for name, told in config.services.items()),
        rollouts=tuple(rollouts_spec(name, told) for name, told in config.rollouts.items()))


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


@dataclass(frozen=True)
class _Earlier:
    """What a broker finds of earlier starts of its job.

    Attributes:
        down_s: for how many seconds no broker ran; -1 if the workers and clients of the last one
            have ended too: it ended in order, or belonged to an earlier start of the Slurm job.
        head: what this broker's first segment of the journal says of the segments before it.
        kept: how many events the checkpoint had handled.
        replayed: how many were replayed behind it.
    """

    down_s: float
    head: SegmentHead
    kept: int
    replayed: int


def _apply_earlier(scheduler: Scheduler, folder_lock: FolderLock) -> _Earlier:
    """Gives the scheduler what the last checkpoint kept, and the events since; a replay never
    plans.

    Raises:
        InvalidInput: a journal is damaged, or was written by a release with other rules.
    """
    folder, event, replayed = folder_lock.folder, None, 0
    journal = JobJournal(folder)
    found = load(folder, journal)
    segment, kept = "", 0
    if found is not None:
        ledger, segment, kept = found
        scheduler.resume(ledger)
    for event in journal.events(segment):
        replayed += 1
        try:
            scheduler.handle(event)
        except (AssertionError, KeyError, InvalidInput) as error:
            raise InvalidInput(
                f"journal of an earlier start in {folder}: this release cannot apply it "
                f"({error!r:.200}); use the release that wrote it; or, if that was this one, run "
                f"`tangram journal repair -j {folder.name}`, which keeps the events before; or "
                "move the folder away to begin anew") from None
    down_s = max(0.0, time.time() - folder_lock.earlier_sign_ns / 1e9)
    if (event is None and not kept) or isinstance(event, BrokerStopped) or (
            folder_lock.earlier_restarts != folder_lock.restarts):
        down_s = -1.0
    return _Earlier(down_s, journal.next_head(folder_lock.epoch), kept, replayed)


def _converse(broker: Broker, link: SocketLink) -> None:
    peer = broker.accept(link)
    link.attach(lambda parcel: broker.receive(peer, *parcel), lambda: broker.room(peer),
                lambda reason: broker.lost(peer, reason))


class _Way(NamedTuple):
    """A socket on which the broker listens, and what others are told.

    Attributes:
        sock: the listening socket.
        address: what others dial.
        certificate: with which its connections are encrypted; None if they are not.
    """

    sock: socket.socket
    address: str
    certificate: Certificate | None = None


def _open_ways(plan: BrokerPlan, environ: Mapping[str, str]) -> tuple[Path, list[_Way]]:
    """Returns a new scratch folder and the ways to this broker.

    Raises:
        InvalidInput: the folder or a socket cannot be made; what was made already is removed. The
            message names the setting.
    """
    config, embedded = plan.config, plan.lifeline >= 0  # all LocalCluster workers are local
    scratch, ways = make_scratch(environ, config.scratch, "broker"), list[_Way]()
    unix = scratch / "broker.sock"
    try:
        ways.append(_Way(_listen_unix(unix), f"unix:{unix}"))
        if (own := own_addresses(config.bind, {} if embedded else environ,
                                 plan.scripts is not None)) is not None:
            sock = _listen_tcp(own.listen, config.ports)
            certificate = certificate_for(own.listen) if config.encryption == "tls" else None
            ways.append(_Way(sock, address_of(own.advertised, sock.getsockname()[1], certificate),
                             certificate))
    except InvalidInput:
        for way in ways:
            way.sock.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return scratch, ways


def _listen_unix(path: Path) -> socket.socket:
    try:
        return listen_unix(str(path))
    except OSError as error:
        raise InvalidInput(f"scratch {path.parent.parent}: no socket can be made there "
                           f"({error.strerror or error}); set `scratch` to a node-local folder "
                           "with a short name") from None


def _listen_tcp(address: str, ports: str) -> socket.socket:
    first, _, last = ports.partition("-")
    asked = range(int(first), int(last or first) + 1) if ports else (0,)
    try:
        return listen_tcp(address, asked)
    except (OSError, OverflowError) as error:  # OverflowError: there are ports up to 65535
        why = error.strerror if isinstance(error, OSError) else error
        if ports:
            raise InvalidInput(f"config field `ports`: no port of {ports} can be had on {address} "
                               f"({why}); each broker on a node needs one of its own") from None
        raise InvalidInput(f"config field `bind`: cannot listen on {address} ({why})") from None
