"""Wiring: the only place that knows which filling goes into which hole.

Law: no behaviour of its own beyond putting parts together, starting them and ending them in order.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .backends.access import Access, mark_ended, read_access, write_access
from .backends.clock import SystemClock
from .backends.cpu import affinity, enforce, memory
from .backends.gpu.devices import Devices, find_devices
from .backends.gpu.meter import GpuMeter
from .backends.journal import FileJournal, journals, next_journal, read_journals
from .backends.loop import LoopTimer, die_on_broken_law, seldom_collect, watch_lifeline
from .backends.node_executor import NodeExecutor
from .backends.rundir import home, job_dir, make_job_dir, make_scratch
from .backends.sandbox.backends import Backends
from .backends.sandbox.executor import SandboxExecutor
from .backends.services.executor import ServiceExecutor
from .backends.services.registry import make_backend
from .backends.slurm.choice import make_slurm
from .backends.slurm.environ import SlurmPlace, slurm_place
from .backends.slurm.remark import leave_remark
from .backends.spool import FileSpool
from .backends.store import FolderStore
from .backends.transport.asyncsock import Listener, SocketLink, listen_tcp, listen_unix
from .backends.transport.channel import SocketChannel
from .backends.transport.dial import dial, way_to
from .backends.transport.naps import sharpen
from .backends.transport.pipes import SocketPipes
from .broker.driver import Broker, Settings
from .broker.satellites import SatelliteScripts
from .client.client import Client
from .config import Config, load_config
from .core.placers.registry import make_placer
from .core.scheduler import Scheduler
from .domain.allocation import AllocPolicy
from .domain.node import NodeSpec
from .domain.service import ServiceSpec
from .endpoints import endpoint_spec
from .errors import AccessError, BrokerUnreachable, InvalidInput, TangramError
from .gateway.driver import Gateway
from .gateway.watchdog import watch
from .ports import (
    Dial,
    Executor,
    Reports,
    SandboxSettings,
    ServiceBackend,
    ServicePlace,
    ServiceRefused,
)
from .services import service_spec
from .version import VERSION
from .wire.message import WorkerWelcome
from .worker.driver import AHEAD, WorkerDriver

_GAP_S = 0.002  # of a busy broker or worker, see there

# ---- broker ------------------------------------------------------------------------------------


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
    folder = make_job_dir(environ, plan.job)
    scratch = make_scratch(environ, config.scratch, "broker")
    ended = asyncio.Event()
    scheduler = Scheduler(make_placer(config.placer), round(config.end_margin_s * 1e9))
    for event in read_journals(folder) if journals(folder) else ():
        scheduler.handle(event)  # an earlier start of this job; a replay never plans
    spool = FileSpool(folder / "once", config.once_mib << 20)
    journal = FileJournal(next_journal(folder), config.sync, loop.call_soon_threadsafe, spool.sync)
    settings = Settings(
        job=plan.job, store=str(folder / "store"), nodes=plan.nodes, grace_s=config.grace_s,
        join_s=config.join_s, kill_wait_s=config.kill_wait_s, output_max=config.output_max,
        user=getpass.getuser(), version=VERSION, gap_s=_GAP_S, endpoints=endpoints,
        services=tuple(service_spec(name, told) for name, told in config.services.items()),
        policy=plan.policy)
    place, clock = slurm_place(environ), SystemClock()
    held = place is not None and place.job == plan.job  # else it is a guest in somebody's job
    slurm = make_slurm(config.slurm, environ, plan.job, config.slurm_query_s, clock) if (
        held) else None
    broker = Broker(scheduler, journal, clock, LoopTimer(loop), settings, ended.set, spool, slurm,
                    plan.scripts)
    key = os.urandom(32)
    sockets = [listen_unix(str(scratch / "broker.sock"))]
    addresses = [f"unix:{scratch / 'broker.sock'}"]
    if config.bind != "none":
        sockets.append(_listen_tcp(config.bind))
        host, port = sockets[-1].getsockname()[:2]
        addresses.append(f"tcp:{host}:{port}")
    listeners = [Listener(sock, key, plan.job, lambda link: _converse(broker, link))
                 for sock in sockets]
    broker.start()
    access = folder / "access.json"
    write_access(access, Access(plan.job, tuple(addresses), key, settings.store,
                                socket.gethostname(), os.getpid()))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, broker.end, f"signal {number.name}",
                                config.end_margin_s / 4)
    loop.add_signal_handler(signal.SIGUSR1, broker.drain, "the job is about to end")
    if plan.lifeline >= 0:
        watch_lifeline(loop, plan.lifeline, lambda: broker.stop("its parent ended"))
    await ended.wait()
    for listener in listeners:
        listener.close()
    mark_ended(access, plan.job, time.strftime("%Y-%m-%dT%H:%M:%S"))
    shutil.rmtree(scratch, ignore_errors=True)
    if broker.over or not spool.names():  # else the job may be requeued, and go on with them
        shutil.rmtree(folder / "store", ignore_errors=True)
    spool.close(remove=broker.over)
    await asyncio.sleep(0.05)  # the last frames leave
    if slurm is not None:
        for _ in range(100):
            if not broker.satellites.cancelling:
                break
            await asyncio.sleep(0.1)
        if config.job_comment and plan.job.isdigit() and (
                why := await leave_remark(slurm, int(plan.job), folder)):
            print(f"tangram: broker: no summary in the job's Comment: {why}", file=sys.stderr)
        await slurm.closed()


def _converse(broker: Broker, link: SocketLink) -> None:
    talk = broker.accept(link)
    link.attach(lambda parcel: broker.receive(talk, *parcel), lambda: None,
                lambda reason: broker.lost(talk, reason))


def _listen_tcp(bind: str) -> socket.socket:
    try:
        return listen_tcp(bind or own_address())
    except OSError as error:
        raise InvalidInput(f"config field `bind`: cannot listen on {bind or own_address()} "
                           f"({error.strerror})") from None


def own_address() -> str:
    """The address that this host's name stands for; loopback when it stands for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


# ---- the way to a broker -----------------------------------------------------------------------


def find_access(environ: Mapping[str, str], job: str = "") -> Path:
    """The access file to use: of this job, `TANGRAM_ACCESS`, `TANGRAM_JOB`, or the Slurm job we
    are in.

    Raises:
        AccessError: nothing names one.
    """
    if job:
        return job_dir(environ, job) / "access.json"
    if environ.get("TANGRAM_ACCESS"):
        return Path(environ["TANGRAM_ACCESS"])
    place = slurm_place(environ)
    named = environ.get("TANGRAM_JOB") or (place.job if place is not None else "")
    if named:
        return job_dir(environ, named) / "access.json"
    raise AccessError("no way to a broker: set TANGRAM_ACCESS to an access file or TANGRAM_JOB to "
                      f"a job below {home(environ)}, or start one with LocalCluster")


def socket_dial(access: Access) -> Dial:
    """A way to the broker over its sockets."""
    return lambda: SocketChannel(dial(access.addresses, access.key, access.job))


def connect(access: str | Path | None = None, *, job: str = "", address: str = "",
            name: str = "") -> Client:
    """A client of the broker of this job; finds the way by itself.

    An MPI world with a gateway rank (`TANGRAM_GATEWAY` is set by whoever started it) is used when
    this process is in one: then the call is collective over the world, and `tangram_hpc.comm` is
    the trainers' own communicator. Otherwise, and when that way is lost, the broker's socket:
    `access` or `TANGRAM_ACCESS` names the access file, else `job`, `TANGRAM_JOB` or the Slurm job
    we are in. `address` (`unix:PATH` or `tcp:HOST:PORT`) overrides those in the access file.

    Raises:
        AccessError: no access file, or one that must not be trusted; one clear line.
        BrokerUnreachable: the broker does not answer.
        WrongWorld: the MPI world is not the one that was launched.
    """
    environ = os.environ
    if access is None and not job and not address and environ.get("TANGRAM_GATEWAY"):
        return _connect_over_mpi(environ, name)
    path = Path(access) if access is not None else find_access(environ, job)
    known = read_access(path)
    if address:
        known = replace(known, addresses=(address,))
    try:
        return Client([socket_dial(known)], known.job, FolderStore, name)
    except BrokerUnreachable as error:
        raise AccessError(f"access file {path}: {error}; the job has ended without a word, or this "
                          "host cannot reach it") from None


def _fallback(path: str) -> Dial:
    """The socket's way when MPI's is lost; the access file is read then, not before."""
    def again() -> SocketChannel:
        known = read_access(Path(path))
        return SocketChannel(dial(known.addresses, known.key, known.job))
    return again


def await_access(path: Path, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> Access:
    """The access file's content as soon as it is there.

    Raises:
        BrokerUnreachable: it did not appear in time, or `alive` says that it never will.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if _is_there(path):
            return read_access(path)
        if not alive() or time.monotonic() > deadline:
            raise BrokerUnreachable(f"access file {path}: the broker did not write it within "
                                    f"{timeout_s:.0f} s")
        time.sleep(0.005)


def _is_there(path: Path) -> bool:
    """Whether a look can be had at it, or never will: the reader says why."""
    try:
        return path.exists()
    except PermissionError:
        return True


_SHARED_FS_S = 10.0  # a shared file system may show a new file so much later

# ---- worker ------------------------------------------------------------------------------------


def lent_devices(config: Config, environ: Mapping[str, str]) -> Devices:
    """The GPUs that this process may lend, or what stands in for them."""
    place = slurm_place(environ)
    return find_devices(environ, config.devices, place.gpus if place is not None else None)


def node_spec(config: Config, environ: Mapping[str, str], backends: Backends,
              component: str = "", name: str = "", devices: Devices | None = None,
              het_group: int = -1) -> NodeSpec:
    """What this process may lend: Slurm's word where there is one, the machine's otherwise.
    `devices`: None: looked for. `het_group`: of a het job, which component it is in."""
    devices = lent_devices(config, environ) if devices is None else devices
    place, real = slurm_place(environ), affinity.usable()
    host = socket.gethostname()
    count = config.cpus or (place.cpus if place is not None else 0) or len(real)
    cores = real[:count] if count <= len(real) else tuple(range(count))
    mem = config.mem_mib or (place.mem_mib if place is not None else 0) or memory.total_mib()
    return NodeSpec(
        name=name or (place.node if place is not None else "") or host, host=host, cores=cores,
        mem_mib=int(mem * config.mem_overcommit),
        gpus=devices.indices, component=component,
        pinned=count <= len(real), ahead=AHEAD,
        ends_at_ns=_ends_at_ns(config.end, place),
        backends=backends.trusted, untrusted=backends.untrusted, devices=devices.summary(),
        allocation=_allocation(place.job, het_group) if place is not None else "")


def _allocation(job: str, het_group: int) -> str:
    """Within a het job every step has the leader's id, and only its srun knew the component."""
    return f"{job}+{het_group}" if het_group >= 0 else job


def _ends_at_ns(end: str, place: SlurmPlace | None) -> int:
    """When this process's allocation ends, by its user's word or Slurm's; 0: nobody says."""
    if end:
        return (int(end) + (int(time.time()) if end[0] == "+" else 0)) * 10**9
    return place.ends_at_s * 10**9 if place is not None else 0


def sandbox_settings(config: Config, welcome: WorkerWelcome) -> SandboxSettings:
    """What a node's executor is told: the node's own settings and the broker's."""
    return SandboxSettings(
        config.disk_mib, config.session_pids, config.starts_max, config.isolation,
        config.enforcement, config.read_paths, config.warm, welcome.kill_wait_s,
        welcome.output_max)


def service_maker(spec: NodeSpec, devices: Devices, scratch: Path
                  ) -> Callable[[ServiceSpec, int], ServiceBackend]:
    """What makes a copy of a service on this node."""
    def make(service: ServiceSpec, number: int) -> ServiceBackend:
        if why := devices.refusal(service.backend):
            raise ServiceRefused(f"service {service.name}: {why}")
        folder = scratch / str(number)
        folder.mkdir(parents=True, mode=0o700)
        threads = max(1, len(spec.cores) // max(1, len(spec.gpus)))
        env = tuple(devices.visible(spec.gpus).items())
        place = ServicePlace(spec.gpus, devices.kind, str(folder), env, threads)
        return make_backend(service, place)
    return make


@dataclass(frozen=True)
class WorkerPlan:
    """What `serve_worker` starts: whose worker, what it lends, and who holds its life."""

    access: Path
    config: Config
    component: str = ""
    name: str = ""
    lifeline: int = -1
    het_group: int = -1


WAY_SHUT = 3  # exit status of a worker, for the script that started it


def lend(plan: WorkerPlan, environ: Mapping[str, str]) -> int:
    """`serve_worker`, and anew, as another node, where the way to the broker was lost and opens
    again within `grace_s`; 0 when the broker says that it is over.

    Raises:
        BrokerUnreachable: it was lost for good; its exit status is `WAY_SHUT` where the broker's
            host cannot be reached, as when it has lost its power.
        AccessError: there is no broker for us.
    """
    while True:
        try:
            return asyncio.run(serve_worker(plan, environ))
        except BrokerUnreachable as lost:
            way = "" if plan.lifeline >= 0 else way_to(plan.access, plan.config.grace_s)
            if way != "open":
                lost.exit_status = WAY_SHUT if way == "shut" else lost.exit_status
                raise
            print(f"tangram: {lost}; it can be reached again", file=sys.stderr, flush=True)


async def serve_worker(plan: WorkerPlan, environ: Mapping[str, str]) -> int:
    """Lends this node until the broker says that it is over (0) or is lost for good (1), or
    a signal tells it to leave (128 and the signal)."""
    loop, config = asyncio.get_running_loop(), plan.config
    seldom_collect()
    die_on_broken_law(loop, "worker")
    access = await_access(plan.access, _SHARED_FS_S)
    backends = Backends.probed(config.isolation, config.read_paths)
    devices = lent_devices(config, environ)
    meter = GpuMeter(devices)
    spec = node_spec(config, environ, backends, plan.component, plan.name, devices,
                     plan.het_group)
    enforce.sweep()  # what workers that were killed here left; `make_scratch` does so for its own
    scratch = make_scratch(environ, config.scratch, "worker")
    ended: asyncio.Future[str] = loop.create_future()
    timer = LoopTimer(loop)

    node: NodeExecutor | None = None

    def make_executor(reports: Reports, welcome: WorkerWelcome) -> Executor:
        nonlocal node
        store = FolderStore(welcome.store)
        sandboxes = SandboxExecutor(reports, store, scratch, spec.cores,
                                    sandbox_settings(config, welcome), backends=backends,
                                    pinned=spec.pinned, gpus=meter)
        make = service_maker(spec, devices, scratch / "services")
        node = NodeExecutor(sandboxes, ServiceExecutor(reports, store, make, spec.mem_mib,
                                                       meter))
        return node

    lost, told = False, 0

    def on_lost(reason: str) -> None:
        nonlocal lost
        lost = True
        driver.lost(reason)

    def on_signal(number: signal.Signals) -> None:
        nonlocal told
        told = number
        driver.leave(f"it left: {number.name}")

    try:
        link = SocketLink(dial(access.addresses, access.key, access.job), loop)
        driver = WorkerDriver(access.job, spec, link, timer, make_executor, ended.set_result,
                              _GAP_S)
        link.attach(lambda parcel: driver.receive(*parcel), lambda: None, on_lost)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if plan.lifeline >= 0:
            watch_lifeline(loop, plan.lifeline, lambda: driver.stop("its parent ended"))
        driver.start()
        reason = await ended
    finally:
        if node is not None:
            await node.closed()
        meter.close()
        shutil.rmtree(scratch, ignore_errors=True)
    if told:
        return 128 + told
    if lost:
        raise BrokerUnreachable(f"job {access.job}: the broker is gone ({reason})")
    return 0


# ---- gateway -----------------------------------------------------------------------------------


def serve_gateway(config: Config, environ: Mapping[str, str], access: str | Path | None = None,
                  job: str = "") -> int:
    """Runs this rank as the gateway of its MPI world until all trainers have left it.

    The access file may still be on its way: it is waited for. Everything that is wrong is told to
    all ranks, so that each of them ends with the same line.

    Raises:
        WrongWorld: the MPI world is not the one that was launched.
        AccessError: there is no broker to serve.
        BrokerUnreachable: the broker went away for good.
    """
    from .backends.transport import mpi

    known, path, problem = None, "", ""
    try:
        patience = mpi.launched(environ).timeout_s * 0.8
        try:
            path = str(Path(access) if access is not None else find_access(environ, job))
            known = await_access(Path(path), patience)
        except TangramError as error:
            problem = str(error)
        world = mpi.meet(environ, mpi.Card("gateway", VERSION,
                                           known.job if known is not None else "", path, problem))
    except TangramError as error:
        if mpi.speaks(environ):
            raise
        return error.exit_status  # rank 0 says it for all
    assert known is not None  # else the meeting has refused
    here = known
    pipes = SocketPipes(lambda: dial(here.addresses, here.key, here.job))
    gateway = Gateway(world.wire, pipes, world.members, time.monotonic_ns, config.gateway_spin_us,
                      os.sched_yield)
    sharpen()
    watch(lambda: gateway.turns)
    orderly = gateway.run()
    world.finalize(orderly)
    if gateway.orphaned:
        raise BrokerUnreachable(f"the gateway ends: job {here.job}: {gateway.orphaned}")
    return 0


def _connect_over_mpi(environ: Mapping[str, str], name: str) -> Client:
    """A client through the world's gateway; over the socket when that way is lost."""
    from .backends.transport import mpi

    world = mpi.meet(environ, mpi.Card("trainer", VERSION))
    dials = [_fallback(world.access)]
    if world.usable:
        spin_us = load_config(environ).gateway_spin_us
        dials.insert(0, lambda: world.dial(spin_us))
    elif world.rank == 0:
        print("tangram: MPI lacks MPI_THREAD_MULTIPLE: using the broker's socket", file=sys.stderr)
    client = Client(dials, world.job, FolderStore, name, world.rank, world.size)
    mpi.leave_after(client)
    return client
