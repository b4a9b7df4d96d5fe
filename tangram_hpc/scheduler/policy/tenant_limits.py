"""Pure. What the limits of a tenant refuse for ever, and what they keep waiting.

The limits are GrpTRES limits as Slurm has them: they bound what all actions and sessions of a
tenant hold at once. An action that alone is beyond a limit could never start, so it is refused. One
that is beyond it only together with others waits, for a Reason in Slurm's words.
"""

from __future__ import annotations

from ...domain.action import Action
from ...domain.ids import client_of
from ...domain.session import SessionSpec
from ..state.ledger import Ledger
from ..state.queue import CPU, GPU, NOTHING, pool_of
from ..state.tenant_use import MEMORY

_REASONS = {CPU: "AssocGrpCpuLimit", GPU: "AssocGrpGRES", MEMORY: "AssocGrpMemLimit"}
_FIELDS = {CPU: ("cpus", "CPUs"), GPU: ("gpus", "GPUs"), MEMORY: ("mem", "MiB")}


def _needs(action: Action) -> list[tuple[str, int]]:
    pool = pool_of(action.key, action.degrees[-1])
    least = next((d for d in action.degrees if d), 1)
    needs = [(pool, least)] if pool != NOTHING else []
    return needs + [(resource, units) for resource, units in
                    ((GPU, action.gpus), (MEMORY, action.mem_mib)) if units]


def refusal_by_limits(ledger: Ledger, action: Action) -> str:
    """Returns why the limits of its tenant never allow an action, with the field; empty if they do.
    """
    return _refusal(ledger, action.id, _needs(action)) if ledger.tenants.limited else ""


def refusal_of_session_by_limits(ledger: Ledger, spec: SessionSpec, reserve: int) -> str:
    """Returns why the limits of its tenant never allow a session that reserves `reserve` CPUs, or
    never its background processes, with the field; empty if they do.
    """
    if not ledger.tenants.limited:
        return ""
    why = _refusal(ledger, spec.id, [(MEMORY, spec.mem_mib), (CPU, reserve)])
    if not why and spec.background == "run":
        why = _refusal(ledger, spec.id, [(CPU, spec.background_cpus[0])])
        why = f"background_{why}" if why else ""
    return why


def _refusal(ledger: Ledger, any_id: int, needs: list[tuple[str, int]]) -> str:
    tenant = ledger.tenants.tenant_of(client_of(any_id))
    for resource, units in needs:
        limit = ledger.tenants.look_up(resource, tenant).limit
        if units > limit:
            field, unit = _FIELDS.get(resource, ("endpoint", "calls"))
            return (f"{field}: {units} asked for, but tenant {tenant!r} may hold {limit} {unit}; "
                    "ask for fewer, or raise its grp_tres in the broker's config file")
    return ""


def limit_reason(ledger: Ledger, action: Action) -> str:
    """Returns the Reason for which a waiting action's tenant may not start it now; empty if it may.
    """
    return _reason(ledger, action.id, _needs(action)) if ledger.tenants.limited else ""


def session_limit_reason(ledger: Ledger, spec: SessionSpec, reserve: int) -> str:
    """Returns the Reason for which a waiting session's tenant may not open it now; empty if it may.
    """
    if not ledger.tenants.limited:
        return ""
    return _reason(ledger, spec.id, [(MEMORY, spec.mem_mib), (CPU, reserve)])


def _reason(ledger: Ledger, any_id: int, needs: list[tuple[str, int]]) -> str:
    tenant = ledger.tenants.tenant_of(client_of(any_id))
    for resource, units in needs:
        use = ledger.tenants.look_up(resource, tenant)
        if use.held + units > use.limit:
            return _REASONS.get(resource, "AssocGrpLimit")
    return ""
