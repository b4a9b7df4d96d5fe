"""The planner of the reference trainer: its input from each step, its advice, and its forecasts.

The planner decides how many of the slots train together with the ranks of the core trainer, which
always train; the other slots do rollouts. It ignores a step in which the pool differed from the
plan in force (a replica was joining), because the times belong to another split. It also ignores
the first step, in which services are loaded.

This module neither trains nor lends, and it must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from tangram_hpc.training import (
    AnalyticCosts,
    Factors,
    Layout,
    OnlinePlanner,
    PlannerSettings,
    Request,
    Search,
    StepFacts,
    read_hardware,
    read_model,
    reprice,
)

_HERE = Path(__file__).resolve().parent
MODEL, HARDWARE = _HERE / "reference-model.toml", _HERE / "reference-hardware.toml"
# plans are frequent, as this training is short; a switch costs the start of a process
SETTINGS = PlannerSettings.model_validate(
    {"plan_interval": 4, "cooldown": 2, "warmup_steps": 2, "reconfiguration_cost_s": 1.0,
     "ema": 0.25})
_SLACK = 0.05  # A slot trains only if it shortens a step by more than this fraction.


class Planned:
    """The planner of one run.

    Args:
        ranks: how many ranks always train.
        slots: how many devices the rollouts have.
        replicas: how many of these may join training.
        batch: trajectories of a step.
        hidden: the width of the model.

    Attributes:
        log: what was forecast, measured and advised, one entry a step.
    """

    def __init__(self, ranks: int, slots: int, replicas: int, batch: int, hidden: int) -> None:
        file, self._hardware = read_model(str(MODEL)), read_hardware(str(HARDWARE)).hardware()
        self._model = replace(file.shape(), hidden=hidden, ffn=2 * hidden,
                              head_dim=hidden // file.heads)
        # the planner divides a batch into equal parts only, which the pool does not need
        even = lcm(*range(ranks, ranks + replicas + 1))
        self._training = replace(file.job(), batch=-(-batch // even) * even)
        self._rollout = file.engine()
        self._ranks, self._slots = ranks, slots
        self._search = Search(min_train=ranks, min_rollout=slots - replicas)
        self._online = OnlinePlanner(self._priced, ranks + slots, self._search,
                                     SETTINGS.triggers(), SETTINGS.learning(), _SLACK)
        assert file.lengths is not None
        self._online.preflight(file.lengths.requests(batch))
        self.log: list[dict[str, Any]] = []

    @property
    def lent(self) -> int:
        """How many replicas train in the plan in force."""
        assert self._online.now is not None, "it was planned before anything ran"
        return self._online.now.train_gpus - self._ranks

    def step(self, step: int, helped: int, train_s: float, rollout_s: float,
             requests: Sequence[Request]) -> int:
        """Tells the planner of a step and adds it to `log`.

        Args:
            step: the number of the step.
            helped: how many replicas trained in it.
            train_s, rollout_s: how long its training and its rollouts took, in seconds.
            requests: its trajectories.

        Returns:
            How many replicas should train from now on.
        """
        foretold = self._foretold(helped, requests)
        fits = helped == self.lent and step > 0
        facts = (StepFacts(step, round(train_s * 1e9), round(rollout_s * 1e9)) if fits
                 else StepFacts(step, 0, 0))
        was = self.lent
        advice = self._online.step(facts, requests, {1: facts.rollout_ns} if fits else {})
        factors = self._online.calibrator.factors()
        self.log.append({
            "step": step, "plan": was, "lent": helped,
            "train_s": {"foretold": foretold[0], "measured": train_s},
            "rollout_s": {"foretold": foretold[1], "measured": rollout_s},
            "factors": {"train": factors.train, "rollout": factors.of(1)},
            "advice": None if advice is None else {
                "reason": advice.reason, "switch": advice.verdict.switch,
                "why": advice.verdict.why, "lend": self.lent}})
        return self.lent

    def _foretold(self, helped: int, requests: Sequence[Request]) -> tuple[float, float]:
        """Returns the forecast seconds of training and of rollouts, with the factors that were
        learned before this step."""
        layout = Layout(1, 1, 1, self._ranks + helped, 1)
        split = reprice(self._priced(requests, self._online.calibrator.factors()),
                        self._ranks + self._slots, layout, (1,) * (self._slots - helped),
                        self._search)
        assert split is not None, "what has just run can run"
        return split.price.ns / 1e9, split.rollout_ns / 1e9

    def _priced(self, requests: Sequence[Request], factors: Factors) -> AnalyticCosts:
        return AnalyticCosts(self._model, self._hardware, self._training, self._rollout, requests,
                             factors)


def figures(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a summary of the planner's log: the number of plans and of switches, and the error of
    each stage's forecasts in the first and in the last quarter of the run. An error is a factor
    (geometric mean); 1 stands for a perfect forecast."""
    part = max(1, len(log) // 4)

    def off(stage: str, some: Sequence[dict[str, Any]]) -> float:
        apart = [abs(math.log(one[stage]["foretold"] / one[stage]["measured"])) for one in some]
        return math.exp(sum(apart) / len(apart))

    advice = [one["advice"] for one in log if one["advice"]]
    return {"plans": len(advice), "switches": sum(one["switch"] for one in advice),
            "lent_at_end": log[-1]["advice"]["lend"] if log[-1]["advice"] else log[-1]["plan"],
            "off_first": {stage: off(stage, log[:part]) for stage in ("train_s", "rollout_s")},
            "off_last": {stage: off(stage, log[-part:]) for stage in ("train_s", "rollout_s")},
            "steps": log}
