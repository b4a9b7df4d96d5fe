"""Pure. What is known of services: declared, learned, and whether another one has room.

Law: a service that no backend serves (as in a simulation) needs nothing of any node.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...domain import event as ev
from ...domain.decision import Decision, PrepareService
from ...domain.service import BLOCK_SIZES, ServiceSpec, service_of
from ..placement.placers.base import Placer
from ..policy.admission import refusal_of_degrees, stands_somewhere
from ..state.ledger import LeaseEntry, Ledger


def declare(ledger: Ledger, spec: ServiceSpec) -> list[Decision]:
    """A service is known from now on, to every node with GPUs."""
    ledger.services[spec.name] = spec
    nodes = [n for n in ledger.up_nodes() if n.spec.gpus] if spec.backend else []
    for node in nodes:
        node.parked_mib = parked_mib(ledger.services.values())
    return [PrepareService(n.node, spec) for n in nodes]


def prepare(ledger: Ledger, joined: ev.NodeJoined) -> list[Decision]:
    """What a node that joined must know of services."""
    services = [s for s in ledger.services.values() if s.backend and joined.spec.gpus]
    ledger.nodes[joined.node].parked_mib = parked_mib(services)
    return [PrepareService(joined.node, s) for s in services]


def parked_mib(services: Iterable[ServiceSpec]) -> int:
    """Host memory that these take parked; those that share their weights once."""
    by_weights = {s.shares or f"\0{s.name}": s.weights_mib for s in services if s.backend}
    return sum(by_weights.values())


def load(ledger: Ledger, event: ev.ServiceLoaded) -> None:
    """A service stands on a block without a call having brought it there."""
    gpus, block = ledger.nodes[event.node].gpus, event.gpus
    assert gpus.mask(block) & ~gpus.free_mask == 0, f"{event}: the block is busy"
    gpus.settle(event.service, block, event.at)


def restored(ledger: Ledger, lease: LeaseEntry, took_ns: int) -> None:
    """What bringing a service in really took: the next time's belief."""
    name = service_of(lease.key)
    if name in ledger.services:  # else a runner's word: a function may have it say anything
        lease.restore_ns = took_ns
        ledger.services[name] = ledger.services[name].restored(took_ns)


def declaration_of_service(ledger: Ledger, placer: Placer, spec: ServiceSpec, now: int
                           ) -> tuple[list[ev.Event], str]:
    """What declaring a service comes to: facts, or why it is refused. The same again is nothing."""
    why = refusal_of_service(ledger, placer, spec)
    known = spec.name in ledger.services
    return ([] if why or known else [ev.ServiceDeclared(now, spec)]), why and (
        f"service {spec.name}: {why}")


def refusal_of_service(ledger: Ledger, placer: Placer, spec: ServiceSpec) -> str:
    """Why this service cannot be declared, naming the field; empty when it can.

    Each node with GPUs keeps all services parked in its memory, those that share their weights
    once; the sum of them must fit. O(services).
    """
    if not set(spec.degrees) <= set(BLOCK_SIZES):
        return f"degrees: {spec.degrees}: a service runs on 1, 2, 4 or 8 GPUs"
    old = ledger.services.get(spec.name)
    if old is not None and _told(old) != _told(spec):
        return (f"name: service {spec.name!r} is declared already, and not like this; "
                "take another name")
    if why := refusal_of_degrees(placer, spec.name, spec.degrees):
        return why
    if not ledger.complete:
        return ""
    nodes = [n for n in ledger.up_nodes() if n.spec.gpus]
    if not any(stands_somewhere(nodes, spec, d) for d in spec.degrees):
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
