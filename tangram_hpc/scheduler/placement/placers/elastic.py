"""Pure. `elastic`: sizes that follow the load while actions run.

Law: CPUs of each node by `elastic_cpus`, blocks of GPUs by `elastic_gpus`, calls of endpoints in
order of readiness as their quotas go; no pool waits for another. Nobody is overtaken without bound
(`waiting`). It believes an action's profile, or what the ledger's estimator learned.
"""

from __future__ import annotations

from ....domain.service import BLOCK_SIZES
from ...state.queue import GPU
from ..snapshot import Snapshot
from .base import Placement, open_by_load, start_calls, start_unitless
from .elastic_cpus import ElasticCpus
from .elastic_gpus import place_services


class ElasticPlacer:
    """The elastic placer."""

    def __init__(self) -> None:
        self.name = "elastic"
        self.reserve, self.block_max = 0, BLOCK_SIZES[-1]
        self._cpus = ElasticCpus()

    def place(self, view: Snapshot) -> Placement:
        """O(nodes + what runs and waits where something is new, times its logarithm)."""
        placement = Placement()
        open_by_load(view, placement)
        if placement.openings:
            return placement
        start_unitless(view, placement)
        self._cpus.place(view, placement)
        if view.ledger.ready.waits(GPU):
            again_at = place_services(view, placement, self._cpus.keeping_gpus())
            if again_at and (not placement.again_at or again_at < placement.again_at):
                placement.again_at = again_at
        start_calls(view, placement)
        return placement
