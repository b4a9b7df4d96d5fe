"""The public API for trainers whose own GPUs are shared between training and rollouts.

Together with `tangram_hpc` and `tangram_hpc.errors` this is all that a trainer needs; the reference
trainer (`hooks/reference`) imports nothing else. It has three parts:

- the hybrid pool: `CoreTrainer` on the ranks that always train, `Member` in each replica that joins
  them, `add_leased_member` where the broker lends the replica's GPUs;
- the planner: `OnlinePlanner` measures train steps and says how many GPUs should train;
- weights of a service that is trained while it is served: `publish_weights`.

Importing it starts nothing and needs no extra.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config.planner.files import read_hardware, read_model
from .config.planner.planner_settings import PlannerSettings
from .domain.hybrid import JoinOutcome, PipelineSignal, ReplicaState
from .libra.hybrid.hybrid_signal import PoolRules
from .libra.live.core_trainer import CoreTrainer
from .libra.live.leased_member import add_leased_member
from .libra.live.member import Member
from .libra.planner.costs import AnalyticCosts
from .libra.planner.online import OnlinePlanner
from .libra.planner.reprice import reprice
from .libra.planner.shapes import Factors, Layout, Request, Search
from .libra.planner.trigger import StepFacts
from .storage.access import read_access
from .transport.mpi.launcher import mpiexec

__all__ = [
    "AnalyticCosts", "CoreTrainer", "Factors", "JoinOutcome", "Layout", "Member", "OnlinePlanner",
    "PipelineSignal", "PlannerSettings", "PoolRules", "ReplicaState", "Request", "Search",
    "StepFacts", "add_leased_member", "mpiexec", "publish_weights", "read_access", "read_hardware",
    "read_model", "reprice",
]


def publish_weights(folder: str | os.PathLike[str], version: int, weights: Mapping[str, Any]
                    ) -> None:
    """Publishes newer weights of a `torch` service that has this folder as its field `fresh`. Each
    batch runs on the newest weights; no call is interrupted. Only one process may publish to a
    folder. Needs the extra `torch`.

    Args:
        folder: the folder; it is made if it is missing.
        version: the number of these weights; it must be larger than all earlier ones.
        weights: the tensors by the names that the model's own parameters have.

    Example:
        publish_weights(run / "fresh", step + 1, dict(model.named_parameters()))
    """
    from .services.torch.torch_fresh import publish  # it imports torch

    publish(Path(folder), version, weights)
