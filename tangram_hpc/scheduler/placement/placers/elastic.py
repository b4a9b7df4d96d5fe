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
from ..snapshot import Snapshot
from .base import Placement, start_unitless
from .elastic_cpus import ElasticCpus
from .elastic_endpoints import ElasticEndpoints
from .elastic_gpus import place_services
from .placer_name import TAIL
from .session_openings import open_by_load


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

    def place(self, view: Snapshot) -> Placement:
        """Returns the placement of one cycle.

        O(nodes + n log n) for n actions that run or wait on nodes that have changed.
        """
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
        self._endpoints.place(view, placement)
        return placement
