"""The table `[planner]` of the configuration.

Every bound and threshold of the planner has its one default here or in the planner's own structs,
and a range. A wrong field is reported in one line that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from ...errors import InvalidInput
from ...libra.planner.calibrate import Learning
from ...libra.planner.shapes import Search
from ...libra.planner.trigger import Triggers
from ..first_error import describe_first_error
from ..table_rules import SettingsTable


class PlannerSettings(SettingsTable):
    """The fields of the table `[planner]`. Fields that end in `_s` are seconds."""

    hardware: str = Field("a800-80g", description="hardware file, or the name of a shipped one")

    tp_share: float = Field(0.50, gt=0, description="layouts are cut whose TP communication takes "
                                                    "more than this fraction of the compute time")
    bubble: float = Field(0.30, ge=0, lt=1, description="layouts are cut whose pipeline is idle "
                                                        "for more than this fraction")
    granularity: int = Field(1, ge=1, le=1024, description="the number of training GPUs is a "
                                                           "multiple of this")
    min_train: int = Field(1, ge=1, description="smallest number of training GPUs")
    min_rollout: int = Field(1, ge=1, description="smallest number of rollout GPUs")
    strata: int = Field(0, ge=0, le=2048, description="groups of requests; 0: 64, doubled until "
                                                      "there is one per GPU, at most 256")
    ahead: int = Field(0, ge=0, le=64, description="staleness bound: batches that roll out beside "
                                                   "an older one, with their trajectories mixed; "
                                                   "0: one batch after the other")
    routing_loss: float = Field(0.0, ge=0, le=10, description=(
        "fraction by which requests take longer when a router that does not know their lengths "
        "distributes them; above 0, also equal instances that get requests in turn are examined"))

    plan_interval: int = Field(10, ge=1, description="steps between plans")
    warmup_steps: int = Field(1, ge=0, description="steps before the first plan")
    queue_pressure: float = Field(0.75, gt=0, le=1)
    rollout_pressure: float = Field(0.85, gt=0, le=1)
    rejected: int = Field(8, ge=1, description="rejected rollouts that trigger a plan")
    time_ratio: float = Field(1.25, gt=1, description="time of the longer stage divided by that of "
                                                      "the shorter one that triggers a plan")
    min_history: int = Field(8, ge=1, description="requests that a plan needs")
    history: int = Field(4096, ge=1, le=1 << 20, description="newest requests that are kept")
    cooldown: int = Field(1, ge=0, description="steps after a plan without another plan")
    reconfiguration_cost_s: float = Field(15.0, ge=0, le=1e6)
    min_gain_ratio: float = Field(0.05, ge=0, lt=1)
    horizon_steps: int = Field(10, ge=1, description="steps over which a plan's gain is summed")

    ema: float = Field(0.1, gt=0, le=1, description="weight of a new sample")
    ema_fast: float = Field(0.8, gt=0, le=1, description="weight of a new sample after a change "
                                                         "point")
    sigma: float = Field(3.0, gt=0, description="standard deviations that make a change point")

    cost_command: tuple[str, ...] = Field((), description="program and arguments that answer with "
                                                          "costs in JSON; empty: the built-in "
                                                          "model")
    cost_timeout_s: float = Field(60.0, gt=0, le=86400)
    cost_fallback: bool = Field(False, description="whether to plan with the built-in model if the "
                                                   "command fails")

    def search(self) -> Search:
        """Returns the bounds of the search in the planner's own type."""
        return Search(self.tp_share, self.bubble, self.granularity, self.min_train,
                      self.min_rollout, self.strata, loss=self.routing_loss,
                      ahead=self.ahead)

    def triggers(self) -> Triggers:
        """Returns the rules that say when to plan, in the planner's own type."""
        return Triggers(
            self.plan_interval, self.warmup_steps, self.queue_pressure, self.rollout_pressure,
            self.rejected, self.time_ratio, self.min_history, self.history, self.cooldown,
            round(self.reconfiguration_cost_s * 1e9), self.min_gain_ratio, self.horizon_steps)

    def learning(self) -> Learning:
        """Returns how fast learned factors follow measurements, in the planner's own type."""
        return Learning(self.ema, self.ema_fast, self.sigma)


def planner_settings(table: Mapping[str, Any]) -> PlannerSettings:
    """Checks a table and returns its settings.

    Raises:
        InvalidInput: A field is unknown or wrong; the message names it.
    """
    try:
        return PlannerSettings(**table)
    except ValidationError as error:
        raise InvalidInput(f"[planner] {describe_first_error(error, PlannerSettings)}") from None

