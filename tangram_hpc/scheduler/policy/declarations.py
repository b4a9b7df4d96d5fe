"""Pure. Answers declarations of services, endpoints and rollout pools with events or a refusal.

A second declaration with the same content has no effect. One with other content is refused while
the first is in use. A refusal names the field and the remedy.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.rollouts import CONTEXT_MAX, RolloutService, RolloutsSpec, wrong_number
from ...domain.service import BLOCK_SIZES, MICRO, EndpointSpec, ServiceSpec, parked_mib
from ...errors import InvalidInput
from ..placement.placers.base import Placer
from ..routing.rollout_pools import shape_of
from ..state.ledger import Ledger
from .admission import has_block_for, refusal_of_degrees

# The costs of a service whose declaration names none: those of a model of about 14 B weights on one
# GPU. With twice the GPUs a step takes 0.65 of the time.
_STEP_NS = {1: 30_000_000, 2: 19_500_000, 4: 12_700_000, 8: 8_200_000}
_REQUEST_NS, _PREFILL_NS = 300_000, 200_000  # on one GPU


def declaration_of_service(ledger: Ledger, placer: Placer, spec: ServiceSpec, now: int
                           ) -> tuple[list[ev.Event], str]:
    """The events that declare a service (none if nothing would change), or why it is refused."""
    why = refusal_of_service(ledger, placer, spec)
    known = spec.name in ledger.services
    return ([] if why or known else [ev.ServiceDeclared(now, spec)]), why and (
        f"service {spec.name}: {why}")


def refusal_of_service(ledger: Ledger, placer: Placer, spec: ServiceSpec) -> str:
    """Why this service cannot be declared, with the field; empty if it can.

    Each node with GPUs keeps all services parked in its memory; services that share their weights
    are kept once; the sum of them must fit. O(services).
    """
    if not set(spec.degrees) <= set(BLOCK_SIZES):
        return f"degrees: {spec.degrees}: a service runs on 1, 2, 4 or 8 GPUs"
    old = ledger.services.get(spec.name)
    if old is not None and _told(old) != _told(spec):
        return (f"name: service {spec.name!r} is declared already with other values; declare it "
                "with the same values, or take another name")
    if why := refusal_of_degrees(placer, spec.name, spec.degrees):
        return why
    if not ledger.complete:
        return ""
    nodes = [n for n in ledger.up_nodes() if n.spec.gpus]
    if not any(has_block_for(nodes, spec, d) for d in spec.degrees):
        where = f" numbered {spec.gpus} on {spec.node or 'it'}" if spec.gpus else ""
        return f"degrees: no node has an aligned block of {spec.degrees[0]} GPUs{where}"
    total = parked_mib([*ledger.services.values(), spec])
    room = min(n.spec.mem_mib for n in nodes)
    if total > room:
        return (f"weights_mib: too many services: parked they would take {total} MiB, a node lends "
                f"{room} MiB; declare fewer or smaller ones, or raise mem_mib")
    return ""


def _told(spec: ServiceSpec) -> tuple[object, ...]:
    return spec.backend, spec.options, spec.degrees, spec.batch


def declaration_of_endpoint(ledger: Ledger, spec: EndpointSpec, now: int
                            ) -> tuple[list[ev.Event], str]:
    """The events that declare an endpoint (none if nothing would change), or why it is refused."""
    if spec.concurrency < 1 or spec.rate_micro < 0 or spec.burst_micro < MICRO:
        return [], f"endpoint {spec.name}: concurrency and burst are at least 1, rate at least 0"
    known = ledger.endpoints.get(spec.name)
    if known is not None and known.spec == spec:
        return [], ""
    if known is not None and (known.busy or ledger.ready.waits("endpoint:" + spec.name)):
        return [], (f"endpoint {spec.name}: it is in use with {_shown(known.spec)}: declare it the "
                    "same, or wait until none of its calls waits or runs")
    return [ev.EndpointDeclared(now, spec)], ""


def _shown(spec: EndpointSpec) -> str:
    rate = f"rate {spec.rate_micro / MICRO:g}/s" if spec.rate_micro else "no rate"
    return f"concurrency {spec.concurrency}, {rate}, a bucket of {spec.burst_micro / MICRO:g}"


def declaration_of_rollouts(ledger: Ledger, told: RolloutsSpec, now: int, changed: bool = False
                            ) -> tuple[list[ev.Event], str]:
    """The events that declare a rollout pool (none if nothing would change), or why it is refused.
    A known pool may be declared otherwise only with `changed`, which says that no turn is under way
    in it.
    """
    spec, why = _resolved(ledger, told)
    known = ledger.rollouts.get(told.name)
    same = known is not None and known.spec == spec
    if not why and known is not None and not same and not changed:
        why = ("name: it is declared already with other values; declare it with the same values, "
               "or take another name")
    if why:
        return [], f"rollouts {told.name}: {why}"
    return ([] if same else [ev.RolloutsDeclared(now, spec)]), ""


def _resolved(ledger: Ledger, told: RolloutsSpec) -> tuple[RolloutsSpec, str]:
    """The pool, with missing values filled in from its services, and what is wrong with the pool.
    """
    services, names = list[RolloutService](), [s.name for s in told.services]
    if why := wrong_number(told):
        return told, why
    if list(told.edges) != sorted(set(told.edges)) or any(e < 1 for e in told.edges):
        return told, f"upto: {list(told.edges)} must ascend from 1"
    if sorted({s.bucket for s in told.services}) != list(range(len(told.edges) + 1)):
        return told, "buckets: each needs a service"
    for each in told.services:
        service = ledger.services.get(each.name)
        if service is None:
            return told, f"services: no service {each.name!r} is declared; register it first"
        if names.count(each.name) > 1:
            return told, f"services: {each.name!r} is named twice"
        degree = each.degree or service.degrees[-1]
        if degree not in service.degrees:
            return told, (f"degree: service {each.name!r} runs on {list(service.degrees)} GPUs, "
                          f"not on {degree}")
        running = each.running_max or max(1, service.batch)
        services.append(RolloutService(
            each.name, each.bucket, degree, running,
            each.queue_max if each.queue_max >= 0 else running, each.context_max or CONTEXT_MAX,
            each.step_ns or _STEP_NS[degree], each.request_ns or _REQUEST_NS // degree,
            each.prefill_ns or _PREFILL_NS // degree, service.node))
    spec = told.with_services(tuple(services))
    try:
        shape_of(spec)
    except InvalidInput as error:
        return told, str(error).removeprefix("cmlfq: ")
    return spec, ""
