"""Pure. What stands on the GPUs during one pass: copies of services, each on its aligned block.

Law: derived from the snapshot and the ledger at the start of a pass, kept true while calls are
granted in it. A block that is not free is never offered.
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

FAR_NS = 3_600_000_000_000  # when units come free of which nothing is known


@dataclass(slots=True, eq=False)
class PlacedCopy:
    """A service on its block; `busy` with this call since `began` (its restore left out)."""

    service: str
    node: NodeView
    gpus: tuple[int, ...]
    used_at: int
    since: int = 0  # when it was brought to the block, epoch ns
    stays_until: int = 0  # it was promised to stay so long
    busy: Action | None = None
    began: int = 0
    ahead: int = 0  # calls that were given to it ahead, behind the one that runs

    @property
    def size(self) -> int:
        """How many GPUs."""
        return len(self.gpus)


def stay(view: Snapshot, service: str) -> int:
    """How long it is not parked once it was brought to a block, in ns."""
    declared = view.ledger.services.get(service)
    return declared.stay_ns if declared is not None else 0


class CopyMap:
    """All of them. Made in O(GPUs + leases on nodes that have some)."""

    def __init__(self, view: Snapshot, placement: Placement) -> None:
        self.view, self._placement = view, placement
        self.of: dict[str, list[PlacedCopy]] = {}
        self.at: dict[tuple[int, int], PlacedCopy] = {}  # by node and GPU
        self.nodes = [n for n in view.nodes.values() if n.gpus.units]
        self.total = sum(len(n.gpus.units) for n in self.nodes)
        for node in self.nodes:
            seen: dict[Resident, None] = dict.fromkeys(node.gpus.resident.values())
            for there in seen:
                self._add(PlacedCopy(there.service, node, there.gpus, there.used_at, there.since,
                                     there.since + stay(view, there.service)))
            self._mark_busy(node)

    def _mark_busy(self, node: NodeView) -> None:
        ledger = self.view.ledger
        for lease_id in ledger.nodes[node.node].leases:
            lease = ledger.leases[lease_id]
            if service_of(lease.key) and lease.state is not LeaseState.RELEASING:
                copy = self.at[node.node, lease.gpus[0]]
                copy.busy = ledger.actions[lease.action].action
                copy.began = lease.granted_at + lease.restore_ns
                copy.ahead = len(lease.lease_queue) - 1

    def _add(self, copy: PlacedCopy) -> None:
        self.of.setdefault(copy.service, []).append(copy)
        for gpu in copy.gpus:
            self.at[copy.node.node, gpu] = copy

    def is_idle(self, copy: PlacedCopy) -> bool:
        """Whether it could take a call now."""
        return all(copy.node.gpus.is_free(gpu) for gpu in copy.gpus)

    def usable(self, want: ActionShape) -> list[PlacedCopy]:
        """The copies, busy or not, on which such a call could run."""
        return [c for c in self.of.get(service_of(want.key), ())
                if c.size in want.degrees and self.may(c.node, want)]

    def may(self, node: NodeView, want: ActionShape) -> bool:
        """Whether a call like this may start on this node, GPUs aside."""
        return (want.node in (0, node.node) and node.takes(want)
                and want.mem_mib <= node.free_mem_mib)

    def may_stand(self, want: ActionShape, node: NodeView, gpus: tuple[int, ...]) -> bool:
        """Whether the service of such calls can be brought to this block."""
        ledger = self.view.ledger
        spec = ledger.services[service_of(want.key)]
        return spec.may_stand(ledger.nodes[node.node].spec.name, gpus)

    def blocks(self, want: ActionShape, size: int) -> list[tuple[NodeView, tuple[int, ...],
                                                                 list[PlacedCopy]]]:
        """Free aligned blocks for such a call, each with the copies that would be parked."""
        found = []
        for node in self.nodes if size in BLOCK_SIZES else ():
            if self.may(node, want):
                for gpus in node.gpus.free_blocks(size):
                    if not self.may_stand(want, node, gpus):
                        continue
                    over = {id(c): c for gpu in gpus
                            if (c := self.at.get((node.node, gpu))) is not None}
                    found.append((node, gpus, list(over.values())))
        return found

    def free_at(self, copy: PlacedCopy | None, now: int) -> int:
        """When this block, or a GPU on which nothing stands, is expected to be free."""
        if copy is None:
            return now
        action = copy.busy
        if action is None:
            return now if self.is_idle(copy) else now + FAR_NS
        estimator = self.view.ledger.estimator
        v = speed(estimator.serial(action), copy.size)
        done = max(0, now - copy.began) * v >> ONE
        end = max(now, copy.began) + (estimator.remaining(action, done) << ONE) // v
        return end + copy.ahead * self.run_ns(action, copy.size)  # they are taken to be like it

    # ---- what a pass does ----------------------------------------------------------------------

    def begin(self, copy: PlacedCopy, action: int, shape: ActionShape, restore_ns: int = 0) -> None:
        """A call starts on a copy."""
        copy.busy = self.view.ledger.actions[action].action
        copy.began = self.view.now_ns + restore_ns
        grant(self.view, self._placement, action, shape, copy.node, copy.size, copy.gpus)

    def open(self, node: NodeView, gpus: tuple[int, ...], action: int, shape: ActionShape) -> None:
        """A call brings its service onto a free block; what stood there is parked."""
        service = service_of(shape.key)
        for gpu in gpus:
            old = self.at.get((node.node, gpu))
            if old is not None:
                self.of[old.service].remove(old)
                for g in old.gpus:
                    del self.at[node.node, g]
        now = self.view.now_ns
        copy = PlacedCopy(service, node, gpus, now, now, now + stay(self.view, service))
        self._add(copy)
        self.begin(copy, action, shape, self.view.ledger.services[service].restore_ns)

    def run_ns(self, action: Action, size: int) -> int:
        """How long a call is expected to run on so many GPUs."""
        serial, work = self.view.ledger.estimator.estimate(action)
        return run_ns(work, serial, size)
