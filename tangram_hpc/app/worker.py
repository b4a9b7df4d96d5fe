"""Puts a worker together: what its node lends, its executor, and the connection with its broker.

A worker lends what Slurm granted to its step, or else the whole machine. It runs until the broker
is done with it, or lost and not back within `grace_s`, or a signal ends it; its scratch folder,
sandboxes and services end with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..config.settings import Config
from ..domain.node import NodeSpec
from ..domain.service import ServiceSpec
from ..errors import AccessError, BrokerUnreachable, InvalidInput
from ..images.node_images import NodeImages
from ..images.pull import PullSettings
from ..ports import (
    Executor,
    Reports,
    SandboxSettings,
    ServiceBackend,
    ServicePlace,
    ServiceRefused,
)
from ..protocol.frame import BUSY_GAP_S
from ..protocol.message import WorkerWelcome
from ..resources import memory, open_files
from ..resources.cpu import affinity, enforce
from ..resources.gpu.devices import CUDA, Devices, find_devices
from ..resources.gpu.gpu_meter import GpuMeter
from ..sandbox.files import scratch as folders
from ..sandbox.manager.backends import OPEN_NETWORK, Backends
from ..sandbox.manager.sandbox_executor import SandboxExecutor
from ..services.backend_registry import make_backend
from ..services.processes.service_executor import ServiceExecutor
from ..slurm.job_environment import SlurmPlace, slurm_place
from ..storage.access import JobHasEnded
from ..storage.output_log import NodeOutputLog
from ..storage.rundir import make_scratch, tangram_home
from ..storage.spill_files import FolderSpillFiles
from ..storage.store import FolderStore
from ..transport.socket.asyncsock import SocketLink
from ..transport.socket.dial import probe_broker
from ..transport.socket.socket_connection import SocketConnection
from ..worker.driver import PREFETCH_MAX, WorkerDriver
from .access_dial import AccessFileDialer
from .broker_location import await_access
from .broker_redial import BrokerRedial
from .loop import LoopTimer, die_on_broken_law, seldom_collect, watch_lifeline
from .node_executor import NodeExecutor

_SHARED_FS_S = 10.0  # seconds after which a shared file system shows a new file at the latest


def lent_devices(config: Config, environ: Mapping[str, str]) -> Devices:
    """The GPUs that this process may lend, or the CPU slots that stand in for them."""
    place = slurm_place(environ)
    return find_devices(environ, config.devices, place.gpus if place is not None else None)


def node_spec(config: Config, environ: Mapping[str, str], backends: Backends,
              component: str = "", name: str = "", devices: Devices | None = None,
              het_group: int = -1) -> NodeSpec:
    """Returns what this process may lend: in a job step what Slurm granted, else the machine.

    Args:
        config: the settings; `cpus` and `mem_mib` come before Slurm's and the machine's numbers.
        environ: the process's environment.
        backends: the isolation backends that work here.
        component: the name of the het component; empty for none.
        name: the node's name; empty for Slurm's or the host's.
        devices: the GPUs; None to look for them.
        het_group: the number of the het component; -1 for none.
    """
    devices = lent_devices(config, environ) if devices is None else devices
    place, real = slurm_place(environ, het_group), affinity.usable()
    host = socket.gethostname()
    count = config.cpus or (place.cpus if place is not None else 0) or len(real)
    cores = real[:count] if count <= len(real) else tuple(range(count))
    mem = config.mem_mib or (place.mem_mib if place is not None else 0) or memory.total_mib()
    return NodeSpec(
        name=name or (place.node if place is not None else "") or host, host=host, cores=cores,
        mem_mib=int(mem * config.mem_overcommit),
        gpus=devices.indices, component=component,
        pinned=count <= len(real), ahead=PREFETCH_MAX,
        ends_at_ns=_ends_at_ns(config.end, place),
        backends=backends.trusted, untrusted=backends.untrusted, devices=devices.summary(),
        image_root=backends.bwrap.root, open_network=backends.open_network,
        why_not_open=backends.why_not.get(OPEN_NETWORK, ""),
        allocation=_allocation(place.job, het_group) if place is not None else "",
        neighbours=affinity.neighbours(cores) if count <= len(real) else (),
        end_by_user=bool(config.end))


def _allocation(job: str, het_group: int) -> str:
    """Returns the allocation's name.

    In a het job every job step sees the id of the leader, so the component's number comes from the
    option of this worker.
    """
    return f"{job}+{het_group}" if het_group >= 0 else job


def _ends_at_ns(end: str, place: SlurmPlace | None) -> int:
    """Returns when this process's allocation ends, in epoch ns.

    The user's setting comes before Slurm's time limit; 0 if neither is known.
    """
    if end:
        return (int(end) + (int(time.time()) if end[0] == "+" else 0)) * 10**9
    return place.ends_at_s * 10**9 if place is not None else 0


def sandbox_settings(config: Config, welcome: WorkerWelcome) -> SandboxSettings:
    """Returns the settings of the node's executor, from the config and the broker's welcome."""
    return SandboxSettings(
        config.disk_mib, config.session_pids, config.starts_max, config.isolation,
        config.enforcement, config.read_paths, config.warm, welcome.kill_wait_s,
        welcome.output_max, config.compiled, welcome.output_bound, config.snapshots_max,
        config.snapshots_mib, config.snapshot_idle_s, config.logs_mib > 0)


def pull_settings(config: Config, store: Path, job_share: str = "") -> PullSettings:
    """The settings for pulling images.

    Args:
        config: the settings.
        store: the node's store, if the settings name none.
        job_share: the folder of the job's own blobs; empty for none.

    Raises:
        InvalidInput: `image_store` names an environment variable that is not set.
    """
    named = os.path.expandvars(config.image_store)
    if "$" in named:
        raise InvalidInput(f"config field `image_store`: {named}: an environment variable in it is "
                           "not set")
    return PullSettings(
        named or str(store), config.image_shares, job_share,
        config.image_insecure, config.image_registries, config.image_max_mib,
        config.image_store_mib)


def weights_cache_mib(config: Config, devices: Devices) -> int:
    """Returns how much of each GPU's memory the weights of services may take while they are
    parked, in MiB: by the setting, otherwise half of the smallest GPU, and nothing on stand-ins.
    """
    if config.weights_cache_mib >= 0:
        return config.weights_cache_mib
    sizes = [device.mem_mib for device in devices.devices if device.kind == CUDA]
    return min(sizes, default=0) // 2


def service_maker(spec: NodeSpec, devices: Devices, scratch: Path
                  ) -> Callable[[ServiceSpec, int], ServiceBackend]:
    """Returns the function that makes a copy of a service on this node."""
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
    """What `serve_worker` is to start.

    Attributes:
        access: the path of the broker's access file for workers.
        config: the settings.
        component: the name of the het component; empty for none.
        name: the node's name; empty for Slurm's or the host's.
        lifeline: the reading end of a pipe; the worker ends when its writing end is closed. -1:
            none.
        het_group: the number of the het component; -1 for none.
    """

    access: Path
    config: Config
    component: str = ""
    name: str = ""
    lifeline: int = -1
    het_group: int = -1


_ENDING = (signal.SIGTERM, signal.SIGINT)  # they tell a worker to leave
WAY_SHUT = 3  # exit status of a worker, for the script that started it


class _JoinedAndLost(BrokerUnreachable):
    """Raised when a broker that was joined is lost. `way` is as `probe_broker` returns it."""

    def __init__(self, text: str, way: str) -> None:
        super().__init__(text)
        self.way = way


def lend(plan: WorkerPlan, environ: Mapping[str, str]) -> int:
    """Runs `serve_worker`, and runs it again as another node when the broker does not take this
    node back, or could not be reached at first and can be within `grace_s`. Returns 0 when the
    broker says that the job is over, and when it was over before the worker of the same Slurm job
    had started, as when a trainer ends at once.

    Raises:
        BrokerUnreachable: the broker was lost for good; the exit status is `WAY_SHUT` if its host
            cannot be reached, as when that host has lost its power.
        AccessError: no broker can be found.
    """
    open_files.allow_many()  # one for each sandbox
    while True:
        try:
            return asyncio.run(serve_worker(plan, environ))
        except JobHasEnded as over:
            place = slurm_place(environ)
            if place is None or place.job != over.job:
                raise
            print(f"tangram: the broker of job {over.job} ended at {over.when}, before the worker "
                  f"on {place.node} had started", file=sys.stderr, flush=True)
            return 0
        except BrokerUnreachable as lost:
            if isinstance(lost, _JoinedAndLost):
                way = lost.way  # `serve_worker` has tried for `grace_s`
            else:
                way = "" if plan.lifeline >= 0 else probe_broker(plan.access, plan.config.grace_s)
            if way != "open":
                lost.exit_status = WAY_SHUT if way == "shut" else lost.exit_status
                raise
            print(f"tangram: {lost}; the worker joins again", file=sys.stderr, flush=True)
            time.sleep(1)  # a connection that opens and breaks at once must not become a busy loop


@dataclass(frozen=True)
class _NodeParts:
    """The parts of this node's executor that exist before the broker's welcome arrives."""

    config: Config
    spec: NodeSpec
    backends: Backends
    devices: Devices
    meter: GpuMeter
    scratch: Path
    enforcer: enforce.Enforcer

    def executor(self, reports: Reports, welcome: WorkerWelcome) -> NodeExecutor:
        spec, store = self.spec, FolderStore(welcome.store)
        sandboxes = SandboxExecutor(reports, store, self.scratch, spec.cores,
                                    sandbox_settings(self.config, welcome), backends=self.backends,
                                    pinned=spec.pinned, gpus=self.meter, enforcer=self.enforcer,
                                    images=NodeImages(pull_settings(
                                        self.config, self.scratch / "images",
                                        f"{welcome.store}/images")),
                                    outputs=self._outputs(Path(welcome.store).parent))
        make = service_maker(spec, self.devices, self.scratch / "services")
        services = ServiceExecutor(reports, store, make, spec.mem_mib, self.meter,
                                   weights_cache_mib(self.config, self.devices))
        return NodeExecutor(sandboxes, services, reports)

    def _outputs(self, job_folder: Path) -> NodeOutputLog | None:
        """The log in the job's folder, which the access file need not be in (`--access COPY`)."""
        if not self.config.logs_mib:
            return None
        return NodeOutputLog(job_folder, self.spec.name, self.config.logs_mib << 20,
                             self.config.logs_s, _warn)


def _warn(text: str) -> None:
    print(f"tangram: warning: {text}", file=sys.stderr, flush=True)


def _make_parts(plan: WorkerPlan, environ: Mapping[str, str], scratch: Path) -> _NodeParts:
    config, devices = plan.config, lent_devices(plan.config, environ)
    backends = Backends.probed(config.isolation, config.read_paths, str(scratch))
    if backends.bwrap.late:
        _warn(f"{backends.bwrap.why_not}, so this node has no sandboxes of it; start the worker "
              "again when the node is less busy")
    spec = node_spec(config, environ, backends, plan.component, plan.name, devices, plan.het_group)
    meter, enforcer = GpuMeter(devices), enforce.probe(spec.pinned, config.enforcement)
    return _NodeParts(config, spec.held_by(enforcer.name), backends, devices, meter, scratch,
                      enforcer)


@dataclass
class _Lent:
    """What this process has made so far to lend its node, and must close.

    Attributes:
        scratch: the folder of everything that it writes.
        parts: what exists before the broker's welcome; None at first.
        executor: what runs the node's work; None before the welcome.
    """

    scratch: Path
    parts: _NodeParts | None = None
    executor: NodeExecutor | None = None

    def make_executor(self, reports: Reports, welcome: WorkerWelcome) -> Executor:
        assert self.parts is not None  # there is a welcome only after they are made
        self.executor = self.parts.executor(reports, welcome)
        return self.executor

    async def close(self) -> None:
        if self.executor is not None:
            await self.executor.closed()  # and its enforcer
        elif self.parts is not None:
            self.parts.enforcer.close()
        if self.parts is not None:
            self.parts.meter.close()
        folders.remove(str(self.scratch))  # also what users of images own in the node's store


def _end_early(number: int, frame: object) -> NoReturn:
    """Ends a worker that has no connection yet; what it has made is removed on the way out."""
    raise SystemExit(128 + number)


async def serve_worker(plan: WorkerPlan, environ: Mapping[str, str]) -> int:
    """Lends this node until the broker or a signal ends it. If the connection breaks, what runs
    goes on while the worker tries to reach a broker again for `grace_s`. Returns 0 if the broker
    said that the job is over, and 128 plus the signal's number if a signal told the worker to
    leave.

    Raises:
        BrokerUnreachable: no broker can be reached, or the one that answers does not take this
            worker back.
        AccessError: no broker can be found.
    """
    loop, config = asyncio.get_running_loop(), plan.config
    seldom_collect()
    die_on_broken_law(loop, "worker")
    pull_settings(config, Path())  # a wrong one is told before anything is lent
    for number in _ENDING:
        signal.signal(number, _end_early)
    access = await_access(plan.access, _SHARED_FS_S)
    enforce.sweep()  # what workers that were killed here left; `make_scratch` does so for its own
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until the folder's removal is certain
    scratch = make_scratch(environ, config.scratch, "worker")
    die_on_broken_law(loop, "worker", where=f"TANGRAM_HOME {tangram_home(environ)}, or scratch "
                                            f"{scratch.parent}")
    ended: asyncio.Future[str] = loop.create_future()
    lent, told = _Lent(scratch), 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal told
        told = number
        driver.leave(f"it left: {number.name}")

    def attach(connection: SocketConnection) -> None:
        """Goes on over another connection."""
        link = SocketLink(connection.sock, loop, connection.encryption)
        _listen(link, driver, redial)
        driver.rejoin(link)

    spill = FolderSpillFiles(scratch / "results")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        lent.parts = _make_parts(plan, environ, scratch)
        found = AccessFileDialer(plan.access).dial_patiently()
        link = SocketLink(found.sock, loop, found.encryption)
        driver = WorkerDriver(access.job, lent.parts.spec, link, LoopTimer(loop),
                              lent.make_executor, ended.set_result, BUSY_GAP_S,
                              secrets.token_hex(16), spill)
        redial = BrokerRedial(plan.access, config.grace_s, driver, attach)
        _listen(link, driver, redial)
        for number in _ENDING:
            loop.add_signal_handler(number, on_signal, number)
        if plan.lifeline >= 0:
            watch_lifeline(loop, plan.lifeline, lambda: driver.stop("its parent ended"))
        driver.start()
        reason = await ended
        redial.close()
    finally:
        await lent.close()
        spill.close()
    if not told:
        _check_end(access.job, driver, redial, reason)
    return 128 + told if told else 0


def _check_end(job: str, driver: WorkerDriver, redial: BrokerRedial, reason: str) -> None:
    """Raises an error if the broker did not say that the job is over.

    Raises:
        _JoinedAndLost: the broker is gone, or does not take this worker back.
        AccessError: the broker refuses this worker, for example because of its version or key.
    """
    if driver.fenced or redial.given_up:
        way = "open" if driver.fenced else "shut" if redial.shut else ""
        what = "the broker is gone" if not driver.refusal else (
            "the broker does not take this worker back")
        raise _JoinedAndLost(f"job {job}: {what} ({reason})", way)
    if driver.refusal:
        raise AccessError(f"job {job}: the broker refuses this worker: {driver.refusal}")


def _listen(link: SocketLink, driver: WorkerDriver, redial: BrokerRedial) -> None:
    link.attach(driver.receive, lambda: None, redial.connection_lost)
