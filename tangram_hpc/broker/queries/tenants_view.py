"""Makes the view `tenants`: what each tenant is granted, holds and waits for, like sshare. Pure."""

from __future__ import annotations

from typing import Any

from ...domain.tenant import TenantSpec
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.queue import CPU, GPU
from ...scheduler.state.tenant_use import MEMORY


def tenants(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns the tenants that were declared or that a client named, by name. There is none while
    all clients are of the default tenant and it was not declared.
    """
    of = scheduler.ledger.tenants
    if not of.compared:
        return {"tenants": []}
    shares = sum(spec.shares for spec in of.specs.values())
    return {"tenants": [_tenant(scheduler, spec, spec.shares / shares)
                        for _, spec in sorted(of.specs.items())]}


def _tenant(scheduler: Scheduler, spec: TenantSpec, norm_shares: float) -> dict[str, Any]:
    of = scheduler.ledger.tenants
    clients = sum(of.tenant_of(client) == spec.name for client in scheduler.ledger.clients)
    return {
        "name": spec.name, "shares": spec.shares, "norm_shares": norm_shares,
        "priority": spec.priority, "grp_tres": dict(spec.grp_tres), "clients": clients,
        "cpus": of.look_up(CPU, spec.name).held, "gpus": of.look_up(GPU, spec.name).held,
        "mem_mib": of.look_up(MEMORY, spec.name).held,
        "waiting": sum(of.look_up(resource, spec.name).waiting
                       for resource in of.resources if resource != MEMORY),
        "sessions_waiting": of.look_up(MEMORY, spec.name).waiting,
    }
