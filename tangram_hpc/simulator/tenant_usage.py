"""Pure. Adds up from events how many cores each tenant held in each second of a simulated run, and
simulates tenants that always want more than there is.
"""

from __future__ import annotations

import random
from collections import Counter

from ..domain import event as ev
from ..domain.ids import client_of
from ..domain.tenant import DEFAULT_TENANT
from ..scheduler.placement.placers.placer_registry import make_placer
from .workload import Cluster, WorkAction, Workload, WorkloadTrajectory, WorkloadTurn
from .world import SimulationWorld

_SECOND = 10**9


class TenantUsage:
    """The core-ns of each tenant, second by second.

    Attributes:
        held_ns: core-ns by (tenant, second of the run).
    """

    def __init__(self) -> None:
        self.held_ns: Counter[tuple[str, int]] = Counter()
        self._tenants: dict[int, str] = {}
        self._leases: dict[int, tuple[str, int]] = {}  # lease -> tenant, cores
        self._now: Counter[str] = Counter()  # cores that each tenant holds
        self._at = 0

    def add(self, event: ev.Event) -> None:
        """Takes one event; events must come in order."""
        self._pass_to(event.at)
        match event:
            case ev.TenantNamed(client=client, tenant=tenant):
                self._tenants[client] = tenant
            case ev.LeaseGranted(lease=lease, action=action, cores=cores):
                tenant = self._tenants.get(client_of(action), DEFAULT_TENANT)
                self._hold(lease, tenant, len(cores))
            case ev.LeaseResized(lease=lease, cores=cores):
                self._hold(lease, self._leases[lease][0], len(cores))
            case ev.LeaseFinished(lease=lease) if lease in self._leases:
                self._hold(lease, self._leases[lease][0], 0)

    def between(self, first: int, last: int) -> dict[str, int]:
        """Returns the core-ns of each tenant in the seconds from `first` up to, not including,
        `last`.
        """
        found: Counter[str] = Counter()
        for (tenant, second), held in self.held_ns.items():
            if first <= second < last:
                found[tenant] += held
        return dict(found)

    def _hold(self, lease: int, tenant: str, cores: int) -> None:
        _, before = self._leases.pop(lease, (tenant, 0))
        self._now[tenant] += cores - before
        if cores:
            self._leases[lease] = tenant, cores

    def _pass_to(self, now: int) -> None:
        while self._at < now:
            second = self._at // _SECOND
            until = min(now, (second + 1) * _SECOND)
            for tenant, cores in self._now.items():
                self.held_ns[tenant, second] += cores * (until - self._at)
            self._at = until


class _Enough(Exception):
    """The simulation has lasted as long as it should."""


def busy_trajectories(tenant: str, count: int, work_s: float, degrees: tuple[int, ...], seed: int,
                      turns: int = 60) -> list[WorkloadTrajectory]:
    """Returns trajectories of a tenant that always have one action under way.

    Args:
        tenant: its name.
        count: how many trajectories.
        work_s: the mean work of an action on one CPU, seconds; works are exponential.
        degrees: the CPUs that an action may have.
        seed: the seed of the works.
        turns: the number of actions of each trajectory.
    """
    rng = random.Random(seed)

    def turn() -> WorkloadTurn:
        work = work_s * (.05 + rng.expovariate(1))
        return WorkloadTurn(think_s=0, actions=(WorkAction(
            name="x", resource="cpu", work_s=work, degrees=degrees, mem_mib=0, serial=.05),))

    return [WorkloadTrajectory(trajectory=f"{tenant}/{k}", tenant=tenant, start_s=0,
                               turns=tuple(turn() for _ in range(turns))) for k in range(count)]


def simulated_usage(placer: str, cluster: Cluster, work: list[WorkloadTrajectory], seconds: int
                    ) -> TenantUsage:
    """Returns what each tenant held in the first seconds of a simulation with known run times.

    Raises:
        ValueError: the trajectories ended before that.
    """
    world = SimulationWorld(Workload(name="tenants", trajectories=tuple(work)), cluster,
                            make_placer(placer), oracle=True)
    world.events = []

    def stop(left: int) -> None:
        if world.event_queue.now > seconds * _SECOND:
            raise _Enough

    try:
        world.run(stop)
    except _Enough:
        usage = TenantUsage()
        for event in world.events:
            usage.add(event)
        return usage
    raise ValueError(f"the trajectories ended before {seconds} s had passed")
