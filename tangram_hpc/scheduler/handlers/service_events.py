"""Pure. Handlers of events about services, and orders to nodes to prepare them.

A service without a backend (as in a simulation) needs nothing of any node. Every node with GPUs
keeps all other services parked in its host memory.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision, PrepareService
from ...domain.service import parked_mib, service_of
from ..state.ledger import LeaseEntry, Ledger
from ..state.scheduler_state import SchedulerState


def on_service_declared(state: SchedulerState, event: ev.ServiceDeclared) -> list[Decision]:
    """Adds a service, and lets every node with GPUs prepare it."""
    ledger, spec = state.ledger, event.spec
    ledger.services[spec.name] = spec
    nodes = [n for n in ledger.up_nodes() if n.spec.gpus] if spec.backend else []
    for node in nodes:
        node.parked_mib = parked_mib(ledger.services.values())
    return [PrepareService(n.node, spec) for n in nodes]


def on_service_loaded(state: SchedulerState, event: ev.ServiceLoaded) -> list[Decision]:
    """Notes that a copy of a service is on a block, although no call has brought it there."""
    gpus, block = state.ledger.nodes[event.node].gpus, event.gpus
    assert gpus.mask(block) & ~gpus.free_mask == 0, f"{event}: the block is busy"
    gpus.settle(event.service, block, event.at)
    state.dirty = True
    return []


def prepare(ledger: Ledger, joined: int) -> list[Decision]:
    """Lets a node that joined prepare the declared services."""
    node = ledger.nodes[joined]
    services = [s for s in ledger.services.values() if s.backend and node.spec.gpus]
    node.parked_mib = parked_mib(services)
    return [PrepareService(joined, s) for s in services]


def note_restore(ledger: Ledger, lease: LeaseEntry, took_ns: int) -> None:
    """Updates a service's expected restore time with the time that a restore really took."""
    name = service_of(lease.key)
    if name in ledger.services:  # a runner may report anything, for it runs the user's function
        lease.restore_ns = took_ns
        ledger.services[name] = ledger.services[name].restored(took_ns)
