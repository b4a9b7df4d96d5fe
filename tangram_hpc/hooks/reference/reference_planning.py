"""Owns: the planner beside the reference trainer - what it is told of each step, what it advises,
and how well it foretold. Must not train, lend or import torch.

Law: ranks of the core and slots are what is split; the ranks always train, and at most as many
slots as there are replicas go over to them. A step in which the pool stood otherwise than the plan
in force (a replica was on its way) teaches the planner nothing: it would learn one split's times as
another's. Nor does the first step, in which services are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from ...config.planner.files import read_hardware, read_model
from ...config.planner.settings import PlannerSettings
from ...libra.planner.costs import AnalyticCosts
from ...libra.planner.online import OnlinePlanner
from ...libra.planner.reprice import reprice
from ...libra.planner.shapes import Factors, Layout, Request, Search
from ...libra.planner.trigger import StepFacts

_HERE = Path(__file__).resolve().parent
MODEL, HARDWARE = _HERE / "reference-model.toml", _HERE / "reference-hardware.toml"
# a tiny training is short: it is planned often, and a switch is a process that has to start
SETTINGS = PlannerSettings.model_validate(
    {"plan_interval": 4, "cooldown": 2, "warmup_steps": 2, "reconfiguration_cost_s": 1.0,
     "ema": 0.25})
_SLACK = 0.05  # a slot that training would hardly miss is better left to rollouts


class Planned:
    """The planner of one run.

    Args:
        ranks, slots, replicas: that train, that roll out, and of these the most that may be lent.
        batch: trajectories of a step.
        hidden: width of the model.
    """

    def __init__(self, ranks: int, slots: int, replicas: int, batch: int, hidden: int) -> None:
        file, self._hardware = read_model(str(MODEL)), read_hardware(str(HARDWARE)).hardware()
        self._model = replace(file.shape(), hidden=hidden, ffn=2 * hidden,
                              head_dim=hidden // file.heads)
        even = lcm(*range(ranks, ranks + replicas + 1))  # the planner divides it, the pool needn't
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
        """How many replicas the plan in force has in training."""
        assert self._online.now is not None, "it was planned before anything ran"
        return self._online.now.train_gpus - self._ranks

    def step(self, step: int, helped: int, train_s: float, rollout_s: float,
             requests: Sequence[Request]) -> int:
        """A step of these trajectories has ended, with so many replicas in training; `lent` from
        here on. What was foretold of it, measured and advised goes to `log`."""
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
        """Seconds of training and rollouts by what was learned before this step."""
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
    """A run's plan in few numbers: by which factor each stage's foretold time was off the measured
    one, in the first and the last quarter (geometric mean, 1: never), what was advised, and all of
    it."""
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
