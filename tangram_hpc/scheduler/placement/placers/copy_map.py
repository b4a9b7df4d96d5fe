"""Tracks which service copies are on the GPUs during one scheduling cycle. Pure.

The map is built from the snapshot and the ledger at the start of a cycle and updated with each call
that is granted. A block that is not free is never offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....domain.action import Action
from ....domain.service import BLOCK_SIZES, service_of
from ....domain.states import LeaseState
from ...state.gpu_blocks import Resident
from ...state.queue import ActionShape
from ...state.speed import ONE, run_ns, speed
from ..snapshot import NodeView, Snapshot
from .base import Placement, grant

_UNKNOWN_NS = 3_600_000_000_000  # assumed wait for a block whose end is not known


@dataclass(slots=True, eq=False)
class PlacedCopy:
    """A service copy on its block.

    Attributes:
        service: name of the service.
        node: the node of the block.
        gpus: the GPUs of the block, by number.
        used_at: when the copy was last used, in epoch ns.
        since: when it was brought to the block, in epoch ns.
        stays_until: before this time it is not parked, in epoch ns (`ServiceSpec.stay_ns`).
        busy: the call that it runs; None while it runs none.
        began: when that call began to run, after any restore, in epoch ns.
        prefetched: how many calls are queued behind the running call.
        left_at: when its block last came free after a call, in epoch ns; 0 for never.
        tenant: the tenant of the call that it ran when the cycle began, or else of the last one;
            "" for none.
    """

    service: str
    node: NodeView
    gpus: tuple[int, ...]
    used_at: int
    since: int = 0
    stays_until: int = 0
    busy: Action | None = None
    began: int = 0
    prefetched: int = 0
    left_at: int = 0
    tenant: str = ""

    @property
    def size(self) -> int:
        """How many GPUs the block has."""
        return len(self.gpus)


def stay_ns(view: Snapshot, service: str) -> int:
    """Returns for how long a copy stays on its block before it may be parked, in ns."""
    declared = view.ledger.services.get(service)
    return declared.stay_ns if declared is not None else 0


class CopyMap:
    """All service copies that are on a block. Built in O(GPUs + leases on nodes that have GPUs).

    Attributes:
        view: the snapshot of this cycle.
        of: the copies of each service.
        at: the copy at each node and GPU.
        nodes: the nodes that have GPUs.
        total: how many GPUs these nodes have.
    """

    def __init__(self, view: Snapshot, placement: Placement) -> None:
        self.view, self._placement = view, placement
        self.of: dict[str, list[PlacedCopy]] = {}
        self.at: dict[tuple[int, int], PlacedCopy] = {}
        self.nodes = [n for n in view.nodes.values() if n.gpus.units]
        self.total = sum(len(n.gpus.units) for n in self.nodes)
        for node in self.nodes:
            seen: dict[Resident, None] = dict.fromkeys(node.gpus.resident.values())
            for there in seen:
                self._add(PlacedCopy(there.service, node, there.gpus, there.used_at, there.since,
                                     there.since + stay_ns(view, there.service),
                                     left_at=there.left_at, tenant=there.tenant))
            self._mark_busy(node)

    def _mark_busy(self, node: NodeView) -> None:
        ledger = self.view.ledger
        for lease_id in ledger.nodes[node.node].leases:
            lease = ledger.leases[lease_id]
            if service_of(lease.key) and lease.state is not LeaseState.RELEASING:
                copy = self.at[node.node, lease.gpus[0]]
                copy.busy = ledger.actions[lease.action].action
                copy.began = lease.granted_at + lease.restore_ns
                copy.prefetched = len(lease.lease_queue) - 1
                copy.tenant = lease.tenant

    def _add(self, copy: PlacedCopy) -> None:
        self.of.setdefault(copy.service, []).append(copy)
        for gpu in copy.gpus:
            self.at[copy.node.node, gpu] = copy

    def is_idle(self, copy: PlacedCopy) -> bool:
        """Returns whether the copy could take a call now."""
        return all(copy.node.gpus.is_free(gpu) for gpu in copy.gpus)

    def usable(self, want: ActionShape) -> list[PlacedCopy]:
        """Returns the copies, busy or not, on which a call of this shape could run."""
        return [c for c in self.of.get(service_of(want.key), ())
                if c.size in want.degrees and self.may(c.node, want)]

    def may(self, node: NodeView, want: ActionShape) -> bool:
        """Returns whether such a call may start on this node once GPUs are free."""
        return (want.node in (0, node.node) and node.takes(want)
                and want.mem_mib <= node.free_mem_mib)

    def may_reside(self, want: ActionShape, node: NodeView, gpus: tuple[int, ...]) -> bool:
        """Returns whether the service of calls of this shape may be brought to this block."""
        ledger = self.view.ledger
        spec = ledger.services[service_of(want.key)]
        return spec.may_stand(ledger.nodes[node.node].spec.name, gpus)

    def blocks(self, want: ActionShape, size: int) -> list[tuple[NodeView, tuple[int, ...],
                                                                 list[PlacedCopy]]]:
        """Returns the free aligned blocks for a call of this shape, and the copies that each would
        park.
        """
        found = []
        for node in self.nodes if size in BLOCK_SIZES else ():
            if self.may(node, want):
                for gpus in node.gpus.free_blocks(size):
                    if not self.may_reside(want, node, gpus):
                        continue
                    found.append((node, gpus, self.on(node, gpus)))
        return found

    def on(self, node: NodeView, gpus: tuple[int, ...]) -> list[PlacedCopy]:
        """Returns the copies on any of these GPUs, each once, in order of GPU."""
        found = {id(c): c for gpu in gpus if (c := self.at.get((node.node, gpu))) is not None}
        return list(found.values())

    def free_at(self, copy: PlacedCopy | None, now: int) -> int:
        """Returns when a block should be free, in epoch ns. `copy` is the copy on it, None for
        none.
        """
        if copy is None:
            return now
        action = copy.busy
        if action is None:
            return now if self.is_idle(copy) else now + _UNKNOWN_NS
        estimator = self.view.ledger.estimator
        v = speed(estimator.serial(action), copy.size)
        done = max(0, now - copy.began) * v >> ONE
        end = max(now, copy.began) + (estimator.remaining(action, done) << ONE) // v
        # The prefetched calls are assumed to run for as long as the current one, in full batches.
        ledger = self.view.ledger
        return end + copy.prefetched * ledger.demand.share(
            copy.service, ledger.services[copy.service].batch, self.run_ns(action, copy.size))

    # ---- changes within a cycle ----------------------------------------------------------------

    def begin(self, copy: PlacedCopy, action: int, shape: ActionShape, restore_ns: int = 0) -> None:
        """Starts a call on a copy."""
        copy.busy = self.view.ledger.actions[action].action
        copy.began = self.view.now_ns + restore_ns
        grant(self.view, self._placement, action, shape, copy.node, copy.size, copy.gpus)

    def open(self, node: NodeView, gpus: tuple[int, ...], action: int, shape: ActionShape) -> None:
        """Brings the service of a call to a free block and starts the call.

        Copies that were on the block are parked.
        """
        service = service_of(shape.key)
        for gpu in gpus:
            old = self.at.get((node.node, gpu))
            if old is not None:
                self._forget(old)
        now = self.view.now_ns
        copy = PlacedCopy(service, node, gpus, now, now, now + stay_ns(self.view, service))
        self._add(copy)
        self.begin(copy, action, shape, self.view.ledger.services[service].restore_ns)

    def forget_evicted(self) -> list[PlacedCopy]:
        """Forgets the copies from whose blocks actions took GPUs in this cycle, and returns them.
        """
        gone = []
        for copy in list({id(c): c for c in self.at.values()}.values()):
            there = copy.node.gpus.resident.get(copy.gpus[0])
            if there is None or (there.service, there.gpus) != (copy.service, copy.gpus):
                gone.append(copy)
                self._forget(copy)
        return gone

    def _forget(self, copy: PlacedCopy) -> None:
        self.of[copy.service].remove(copy)
        for gpu in copy.gpus:
            del self.at[copy.node.node, gpu]

    def run_ns(self, action: Action, size: int) -> int:
        """Returns the expected run time of a call on this number of GPUs, in ns."""
        serial, work = self.view.ledger.estimator.estimate(action)
        return run_ns(work, serial, size)
