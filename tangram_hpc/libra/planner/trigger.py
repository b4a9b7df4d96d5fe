"""Pure. Decides when to plan again, and whether a new plan is worth the cost of switching.

Invariants: no plan is made without enough history, during warm-up, or within the cooldown of the
last plan. A switch must shorten the step by a fraction, and must gain more over the horizon than it
costs. Every verdict gives its reason. The thresholds are Libra's; docs/LIBRA.md says which of their
readings are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from .shapes import SECOND, Request


@dataclass(frozen=True)
class Triggers:
    """When to plan, and how much a switch must gain. A step is a train_step."""

    interval: int = 10  # steps after which a plan is made without any other reason
    warmup: int = 1  # steps before the first plan
    queue_pressure: float = 0.75  # fraction of the rollout queues in use
    rollout_pressure: float = 0.85  # fraction of the rollout slots in use
    rejected: int = 8  # rollouts refused since the last plan
    time_ratio: float = 1.25  # the longer of training and rollouts over the shorter
    min_history: int = 8  # requests that must have been seen
    history: int = 4096  # requests that are remembered
    cooldown: int = 1  # steps after a plan in which no other one is made
    switch_cost_ns: int = 15 * SECOND
    min_gain: float = 0.05  # fraction of the step that a switch must gain
    horizon: int = 10  # steps over which a gain is counted


class StepFacts(NamedTuple):
    """The measurements of a step."""

    step: int
    train_ns: int
    rollout_ns: int
    queue_pressure: float = 0.0
    rollout_pressure: float = 0.0
    rejected: int = 0  # rollouts refused in this step


class Verdict(NamedTuple):
    """Whether to switch, and why or why not."""

    switch: bool
    why: str


class Trigger:
    """The history of requests, and the counts since the last plan."""

    def __init__(self, rules: Triggers) -> None:
        self.rules = rules
        self.history: deque[Request] = deque(maxlen=rules.history)
        self._planned_at = 0
        self._rejected = 0

    def add(self, requests: Iterable[Request]) -> None:
        """Adds requests that have ended to the history."""
        self.history.extend(requests)

    def due(self, facts: StepFacts) -> str:
        """Why to plan after this step; "" if no plan is due. Call it once for each step. O(1)."""
        rules = self.rules
        self._rejected += facts.rejected
        # the trainer may have gone back to a checkpoint of an earlier step
        self._planned_at = min(self._planned_at, facts.step)
        since = facts.step - self._planned_at
        if (facts.step < rules.warmup or since < rules.cooldown
                or len(self.history) < rules.min_history):
            return ""
        return self._pressure(facts) or (
            f"{since} steps since the last plan" if since >= rules.interval else "")

    def planned(self, step: int) -> None:
        """Notes that a plan was made after this step, whether it was taken or not."""
        self._planned_at, self._rejected = step, 0

    def saved(self) -> dict[str, Any]:
        """The whole state, for a file."""
        return {"history": [[*astuple(one)] for one in self.history],
                "planned_at": self._planned_at, "rejected": self._rejected}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the state that `saved` returned."""
        self.history = deque((Request(*one) for one in saved["history"]), self.rules.history)
        self._planned_at, self._rejected = int(saved["planned_at"]), int(saved["rejected"])

    def _pressure(self, facts: StepFacts) -> str:
        rules = self.rules
        if facts.queue_pressure >= rules.queue_pressure:
            return f"queue pressure {facts.queue_pressure:.2f}"
        if facts.rollout_pressure >= rules.rollout_pressure:
            return f"rollout pressure {facts.rollout_pressure:.2f}"
        if self._rejected >= rules.rejected:
            return f"{self._rejected} rollouts refused"
        low, high = sorted((facts.train_ns, facts.rollout_ns))
        if low > 0 and high / low >= rules.time_ratio:
            slower = "training" if facts.train_ns == high else "rollouts"
            return f"{slower} {high / low:.2f} times as long as the other side"
        return ""


def worth(rules: Triggers, in_force_ns: int | None, planned_ns: int) -> Verdict:
    """Whether to switch from `in_force_ns` a step (None: it cannot run) to `planned_ns`."""
    if in_force_ns is None:
        return Verdict(True, "the plan in force cannot run with these lengths")
    gain = in_force_ns - planned_ns
    share = gain / in_force_ns if in_force_ns else 0.0
    told = f"{in_force_ns / 1e9:.3f} s to {planned_ns / 1e9:.3f} s a step"
    if gain <= 0:
        return Verdict(False, f"nothing to gain: {told}")
    if share < rules.min_gain:
        return Verdict(False, f"{told} is {share:.1%}, less than {rules.min_gain:.1%}")
    total, cost = gain * rules.horizon, rules.switch_cost_ns
    over = f"{total / 1e9:.1f} s in {rules.horizon} steps"
    if total <= cost:
        return Verdict(False, f"{told} gains {over}, switching costs {cost / 1e9:.1f} s")
    return Verdict(True, f"{told} gains {over}, more than the {cost / 1e9:.1f} s of switching")
