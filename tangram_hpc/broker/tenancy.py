"""Pure. The tenants of a broker: what its settings declare, and which names a client may choose.

Without declared tenants a client may choose any name, and each tenant has one share. Where tenants
are declared, their names are the only ones, so that a wrong word does not become one more tenant
with a share of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..domain import event as ev
from ..domain.tenant import DEFAULT_TENANT, TenantSpec
from ..scheduler.state.ledger import Ledger

TENANTS_MAX = 256  # that clients may name, since each is kept until the job ends


def tenants_declared(ledger: Ledger, specs: Sequence[TenantSpec], now: int) -> list[ev.Event]:
    """Returns the events by which a broker that starts declares the tenants of its settings.

    A tenant that an earlier start declared, and that the settings name no more, gets one share and
    no limits.

    Args:
        ledger: what is known of earlier starts.
        specs: the tenants of the settings.
        now: the time in epoch ns.
    """
    wanted = {name: TenantSpec(name) for name in ledger.tenants.specs}
    wanted |= {spec.name: spec for spec in specs}
    known = ledger.tenants.specs
    return [ev.TenantDeclared(now, spec) for name, spec in wanted.items()
            if known.get(name) != spec]


def refusal_of_tenant(ledger: Ledger, specs: Sequence[TenantSpec], tenant: str) -> str:
    """Returns why a client may not choose a tenant; empty if it may.

    Args:
        ledger: knows the tenants that were chosen until now.
        specs: the tenants of the settings.
        tenant: the name that the client gives; empty for the default tenant.
    """
    names = [spec.name for spec in specs]
    if tenant in ("", DEFAULT_TENANT, *names):
        return ""
    if not specs and (tenant in ledger.tenants.specs or len(ledger.tenants.specs) < TENANTS_MAX):
        return ""
    if not specs:
        return f"tenant {tenant!r}: there are {TENANTS_MAX} tenants already; choose one of them"
    return (f"tenant {tenant!r} is not declared; choose one of {', '.join(names)} "
            f"(TANGRAM_TENANT), or add [tenants.{tenant}] to the broker's config file")


def is_to_be_named(ledger: Ledger, client: int, tenant: str) -> bool:
    """Returns whether a client that has joined is yet to be counted for the tenant that it names.

    A broker may have been killed after it recorded the client and before it recorded the tenant.
    """
    entry = ledger.clients[client]
    unused = not (entry.active_at or entry.last_session or entry.actions)
    return bool(tenant) and unused and ledger.tenants.tenant_of(client) != tenant
