"""Pure. The costs that a search asks for, and the analytic model that answers them.

`Costs` is the port, `AnalyticCosts` one adapter; the other one asks an external command
(`libra/live/plan_costs.py`).

Invariants: prices are whole ns and include the learned factors; `NEVER` is the price of a layout or
segment that cannot run. The same question has the same answer for as long as one plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .flow_cost import FlowCost
from .lengths import Ints, Strata, batch_of, strata_of
from .rollout_cost import RolloutCost
from .shapes import (
    NEVER,
    SECOND,
    Factors,
    Hardware,
    Layout,
    ModelShape,
    Prices,
    Request,
    Rollout,
    Training,
)
from .train_cost import TrainCost


class Costs(Protocol):
    """The costs that a search needs.

    Attributes:
        model, hardware, training, rollout: The inputs of the plan.
        batch: The requests of one batch.
    """

    model: ModelShape
    hardware: Hardware
    training: Training
    rollout: Rollout
    batch: Sequence[Request]

    def tp_share(self, tp: int) -> float:
        """Communication of tensor parallelism over compute, as a ratio."""
        ...

    def train(self, layouts: Sequence[Layout]) -> Prices:
        """The price of each layout, in order."""
        ...

    def strata(self, most: int) -> Strata:
        """The batch in at most `most` groups."""
        ...

    def segments(self, degree: int, strata: Strata) -> Ints:
        """See `RolloutCost.matrix`."""
        ...

    def flow(self, degree: int, strata: Strata, ahead: int, train_ns: int) -> Ints:
        """See `FlowCost.matrix`."""
        ...


def matrix_of(strata: int, times: Mapping[tuple[int, int], int]) -> Ints:
    """A matrix like `RolloutCost.matrix`, from a function that gives the ns of each (j, i)."""
    found = np.full((strata + 1, strata + 1), NEVER, np.int64)
    np.fill_diagonal(found, 0)
    for (j, i), ns in times.items():
        found[j, i] = ns
    return found


class AnalyticCosts:
    """The models of `train_cost`, `rollout_cost` and `flow_cost`, times learned factors."""

    def __init__(self, model: ModelShape, hardware: Hardware, training: Training,
                 rollout: Rollout, history: Sequence[Request],
                 factors: Factors | None = None) -> None:
        """Prepares the models.

        Args:
            model, hardware, training, rollout: The inputs of the plan.
            history: Requests that were seen; a batch of `training.batch` requests is spread over
                them.
            factors: Learned factors; default 1 for everything.
        """
        self.model, self.hardware = model, hardware
        self.training, self.rollout = training, rollout
        self.batch: Sequence[Request] = batch_of(history, training.batch)
        self.factors = factors or Factors()
        self.train_cost = TrainCost(model, hardware, training, self.batch)
        self.rollout_cost = RolloutCost(model, hardware, rollout)
        self._strata: dict[int, Strata] = {}
        self._flows: dict[int, tuple[Strata, FlowCost]] = {}

    def tp_share(self, tp: int) -> float:
        """Communication of tensor parallelism over compute, at the batch's mean length."""
        return self.train_cost.tp_share(tp)

    def train(self, layouts: Sequence[Layout]) -> Prices:
        """The price of each layout, in order. O(layouts)."""
        return self.train_cost.prices(layouts, self.factors.train)

    def strata(self, most: int) -> Strata:
        """The batch in at most `most` groups; the same object for the same `most`."""
        if most not in self._strata:
            self._strata[most] = strata_of(self.batch, most)
        return self._strata[most]

    def segments(self, degree: int, strata: Strata) -> Ints:
        """See `RolloutCost.matrix`."""
        return self.rollout_cost.matrix(degree, strata, self.factors.of(degree))

    def flow(self, degree: int, strata: Strata, ahead: int, train_ns: int) -> Ints:
        """See `FlowCost.matrix`."""
        kept = self._flows.get(degree)
        if kept is None or kept[0] is not strata:
            kept = self._flows[degree] = strata, FlowCost(self.rollout_cost, degree, strata)
        return kept[1].matrix(ahead, train_ns / SECOND, self.factors.of(degree))
