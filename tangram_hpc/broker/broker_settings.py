"""The values that a broker is given at its start."""

from __future__ import annotations

from dataclasses import dataclass

from ..domain.allocation import AllocPolicy
from ..domain.rollouts import RolloutsSpec
from ..domain.service import EndpointSpec, ServiceSpec
from ..domain.tenant import TenantSpec


@dataclass(frozen=True)
class Settings:
    """The values that a broker is given at its start.

    Attributes:
        job: id of the job whose actions the broker schedules.
        store: path of the folder of large payloads, which clients and workers are told.
        nodes: number of workers that are expected to join.
        grace_s: for how many seconds a client may be disconnected before its work is cancelled.
        join_s: how long the broker waits for `nodes` workers, in seconds.
        kill_wait_s: seconds between SIGTERM and SIGKILL, which workers are told.
        output_max: bytes of output that are kept of each stream of a command.
        output_bound: bytes of each stream that a command may ask to keep.
        user: login name of the job's owner, for accounting.
        version: version of tangram_hpc, for accounting.
        services: services of the config file.
        endpoints: endpoints of the config file.
        rollouts: rollout pools of the config file.
        tenants: tenants of the config file.
        gap_s: pause between two scheduling cycles of a busy broker, in seconds, so that its cycles
            are few and large; 0 for none.
        policy: how many nodes the broker may request from Slurm, and which; None for none.
        slurm_query_s: least time between two queries to Slurm, in seconds.
        rejoin_s: for how many seconds the broker waits for the workers and clients of the broker
            before it; 0 if they have ended with it.
        epoch: the broker's epoch of the job's folder, which clients and workers are told; 0 for
            none.
        down_s: for how many seconds no broker ran before this one; 0 if that does not matter.
        granted_at: when Slurm granted the job its nodes, in ns since the epoch; 0 if not known.
        account: the Slurm account that the job is charged to; empty for none.
    """

    job: str
    store: str
    nodes: int = 1
    grace_s: float = 30.0
    join_s: float = 120.0
    kill_wait_s: float = 2.0
    output_max: int = 1 << 20
    output_bound: int = 64 << 20
    user: str = ""
    version: str = ""
    services: tuple[ServiceSpec, ...] = ()
    endpoints: tuple[EndpointSpec, ...] = ()
    rollouts: tuple[RolloutsSpec, ...] = ()
    tenants: tuple[TenantSpec, ...] = ()
    gap_s: float = 0.0
    policy: AllocPolicy | None = None
    slurm_query_s: float = 30.0
    rejoin_s: float = 0.0
    down_s: float = 0.0
    epoch: int = 0
    granted_at: int = 0
    account: str = ""
