"""The placer `elastic`: sizes follow the load while actions run. Pure.

The CPUs of each node are divided by `elastic_cpus`, blocks of GPUs are lent by `elastic_gpus`, and
endpoint calls start in order of readiness as their quotas allow (`elastic_endpoints`). An action
that waits for one kind of unit holds up no action that wants another kind. No action is overtaken
without bound (`waiting`). Run times come from an action's profile, or else from the ledger's
estimator.
"""

from __future__ import annotations

from ....domain.service import BLOCK_SIZES
from ...state.queue import GPU
from ...state.tenant_use import MEMORY
from ..snapshot import Snapshot
from .base import Placement, start_unitless
from .cpus.elastic_cpus import ElasticCpus
from .elastic_endpoints import ElasticEndpoints
from .elastic_gpus import ServiceCycle
from .kept_units import KeptUnits
from .placer_name import TAIL
from .recent_use import RecentUse
from .session_openings import open_by_load
from .tenant_parts import BALANCE_NS


class ElasticPlacer:
    """Places CPUs, GPUs and endpoint calls, and resizes actions while they run.

    Args:
        tail: how much an action counts more the longer it takes, from 0 to TAIL_MAX
            (`cpu_division.weight`).
    """

    def __init__(self, tail: int = TAIL) -> None:
        self.name = "elastic" if tail == TAIL else f"elastic:{tail}"
        self.reserve, self.block_max = 0, BLOCK_SIZES[-1]
        self._cpus, self._endpoints = ElasticCpus(tail), ElasticEndpoints()
        self._memory = RecentUse()  # what tenants held of the memory of all nodes lately

    def place(self, view: Snapshot) -> Placement:
        """Returns the placement of one cycle.

        O(nodes + n log n) for n actions that run or wait on nodes that have changed.
        """
        placement = Placement()
        kept = self._kept_memory(view)
        open_by_load(view, placement, kept_memory=kept)
        if placement.openings:
            return placement
        start_unitless(view, placement)
        self._place_units(view, placement)
        self._endpoints.place(view, placement)
        if kept is not None and kept.held_back:
            placement.look_again(view.now_ns + BALANCE_NS)
        return placement

    def _place_units(self, view: Snapshot, placement: Placement) -> None:
        """Places what needs CPUs or GPUs."""
        cpus, ready = self._cpus, view.ledger.ready
        if ready.waits(GPU) and ready.gpu_actions:
            services = ServiceCycle(view, placement, cpus.keeping_gpus())
            services.serve_starved()
            cpus.place(view, placement)
            cpus.look_again_at(services.give_back(cpus.keeping_gpus()))
            placement.look_again(services.go())
            return
        cpus.place(view, placement)
        if ready.waits(GPU):
            placement.look_again(ServiceCycle(view, placement, cpus.keeping_gpus()).go())

    def _kept_memory(self, view: Snapshot) -> KeptUnits | None:
        """Returns the memory that is kept for tenants' sessions; None if there is nothing to
        compare or no session waits.
        """
        turns = view.turns(MEMORY) if view.ledger.session_queue else None
        if turns is None:
            return None
        return KeptUnits(sum(node.entry.spec.mem_mib for node in view.nodes.values()),
                         sum(node.free_mem_mib for node in view.nodes.values()),
                         turns, self._memory, view.now_ns)
