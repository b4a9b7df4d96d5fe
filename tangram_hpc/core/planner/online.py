"""Pure. A planner beside a running trainer: told each step, it says when to switch to which split.

Law: the plan in force changes by `preflight` and by an `Advice` that says so, by nothing else.
Measured times correct the model before it is asked again; old and new plan are priced for the same
batch with the same factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import InvalidInput
from .calibrate import TRAIN, Calibrator, Learning
from .costs import Costs
from .shapes import Factors, Request, Search
from .split import Plan, Split, plan
from .standing import standing
from .trigger import StepFacts, Trigger, Triggers, Verdict, worth

Priced = Callable[[Sequence[Request], Factors], Costs]  # costs of a history with learned factors


@dataclass(frozen=True)
class Advice:
    """A plan that was made: why, what the plan in force and the new one take, and whether to
    switch. `plan` is None where none can run."""

    reason: str
    verdict: Verdict
    plan: Plan | None
    standing: Split | None


class OnlinePlanner:
    """One trainer's planner."""

    def __init__(self, priced: Priced, gpus: int, search: Search, triggers: Triggers,
                 learning: Learning) -> None:
        self._priced, self._gpus, self._search = priced, gpus, search
        self.trigger, self.calibrator = Trigger(triggers), Calibrator(learning)
        self._now: Split | None = None

    @property
    def now(self) -> Split | None:
        """The split in force."""
        return self._now

    def preflight(self, history: Sequence[Request]) -> Plan:
        """The first plan, before anything runs: switching costs nothing.

        Raises:
            InvalidInput: no split can run.
        """
        self.trigger.add(history)
        found = plan(self._priced(history, self.calibrator.factors()), self._gpus, self._search)
        self._now = found.best
        return found

    def step(self, facts: StepFacts, requests: Sequence[Request],
             rollouts: Mapping[int, int]) -> Advice | None:
        """A step has ended with these requests; `rollouts`: ns that the slowest instance of each
        degree took. A plan is made if one is due, and taken if it is worth it."""
        assert self._now is not None, "preflight comes first"
        self.trigger.add(requests)
        self._learn(facts, requests, rollouts)
        reason = self.trigger.due(facts)
        if not reason:
            return None
        self.trigger.planned(facts.step)
        costs = self._priced(list(self.trigger.history), self.calibrator.factors())
        degrees = [one.degree for one in self._now.instances]
        old = standing(costs, self._gpus, self._now.layout, degrees, self._search)
        try:
            found = plan(costs, self._gpus, self._search)
        except InvalidInput as error:
            return Advice(reason, Verdict(False, str(error)), None, old)
        verdict = worth(self.trigger.rules, old.step_ns if old else None, found.best.step_ns)
        if verdict.switch:
            self._now = found.best
        return Advice(reason, verdict, found, old)

    def _learn(self, facts: StepFacts, requests: Sequence[Request],
               rollouts: Mapping[int, int]) -> None:
        """Against what the bare model says of the very requests of this step."""
        if not requests or self._now is None:
            return
        bare = self._priced(requests, Factors())
        mean = sum(r.total for r in requests) / len(requests)
        modelled = standing(bare, self._gpus, self._now.layout,
                            [one.degree for one in self._now.instances], self._search)
        if modelled is None:
            return
        self.calibrator.observe(TRAIN, modelled.price.ns, facts.train_ns, mean)
        for degree, measured in rollouts.items():
            said = max((x.ns for x in modelled.instances if x.degree == degree), default=0)
            self.calibrator.observe(degree, said, measured, mean)
