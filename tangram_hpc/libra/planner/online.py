"""Pure. The planner of a running trainer: gets the figures of each step and says when to switch.

After each step it corrects the cost model by the measured times, asks the trigger whether a plan is
due, and compares the new plan with the one in force.

Invariants: the plan in force changes only in `preflight` and with an `Advice` that says so. Old and
new plan are priced for the same batch with the same factors. Rollouts that had begun before a plan
was taken are not used to correct it, and a plan that can run is measured before another one is
searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from ...errors import InvalidInput
from .calibrate import TRAIN, Calibrator, Learning
from .costs import Costs
from .reprice import reprice
from .shapes import Factors, Layout, Request, Search
from .split import Split, SplitPlan, plan
from .trigger import StepFacts, Trigger, Triggers, Verdict, worth

Priced = Callable[[Sequence[Request], Factors], Costs]  # the costs of a history, with these factors


@dataclass(frozen=True)
class Advice:
    """A plan that was made.

    Attributes:
        reason: Why a plan was due.
        verdict: Whether to switch to it, and why or why not.
        plan: The new plan; None where no split can run.
    """

    reason: str
    verdict: Verdict
    plan: SplitPlan | None


class OnlinePlanner:
    """The planner of one trainer."""

    def __init__(self, priced: Priced, gpus: int, search: Search, triggers: Triggers,
                 learning: Learning, slack: float = 0.0) -> None:
        """Prepares a planner without a plan; call `preflight` next.

        Args:
            priced: Makes the costs of a history with learned factors.
            gpus: GPUs to divide.
            search: Bounds of the search.
            triggers: When to plan, and what a switch must gain.
            learning: How factors follow measurements.
            slack: See `SplitPlan.roomy`.
        """
        self._priced, self._gpus, self._search = priced, gpus, search
        self._slack = slack
        self.trigger, self.calibrator = Trigger(triggers), Calibrator(learning)
        self._now: Split | None = None
        self._degrees: tuple[int, ...] = ()  # of all instances of the plan; some may idle in `_now`
        self._lag = 1 + search.ahead  # steps whose rollouts had begun before a plan was taken
        self._since = 2 * self._lag  # steps on this plan; no rollouts had begun before the first
        self._sums = (0, 0, 0)  # modelled ns, measured ns and number of at most `_lag` steps

    @property
    def now(self) -> Split | None:
        """The split in force; None before `preflight`."""
        return self._now

    @property
    def mixed(self) -> bool:
        """Whether the plan in force has instances of several degrees."""
        return len(set(self._degrees)) > 1

    @property
    def settled(self) -> bool:
        """Whether all rollouts of the step that ends next have run on the plan in force."""
        return self._since >= self._lag

    def preflight(self, history: Sequence[Request]) -> SplitPlan:
        """Makes and takes the first plan, before anything runs, so switching costs nothing.

        Raises:
            InvalidInput: `history` is empty, or no split can run.
        """
        if not history:
            raise InvalidInput("history: it has no request, so no step can be priced; give some of "
                               "an earlier run, or some with the lengths that you expect")
        self.trigger.add(history)
        costs, search = self._believed(history)
        found = plan(costs, self._gpus, search)
        self._take(found.roomy(self._slack))
        self._since = 2 * self._lag
        return found

    def step(self, facts: StepFacts, requests: Sequence[Request],
             rollouts: Mapping[int, int]) -> Advice | None:
        """Learns from a step that has ended, and plans if a plan is due.

        Args:
            facts: What was measured in the step.
            requests: The requests that ended in it.
            rollouts: For each degree, the ns that its slowest instance took.

        Returns:
            The advice, which is already taken if it says to switch; None if no plan was due.
        """
        assert self._now is not None, "preflight comes first"
        self.trigger.add(requests)
        self._learn(facts, requests, rollouts)
        self._since += 1
        reason = self.trigger.due(facts)
        if not reason:
            return None
        costs, search = self._believed(list(self.trigger.history))
        old = reprice(costs, self._gpus, self._now.layout, self._degrees, search)
        if old is not None and self._since < 2 * self._lag:
            return None
        self.trigger.planned(facts.step)
        try:
            found = plan(costs, self._gpus, search)
        except InvalidInput as error:
            return Advice(reason, Verdict(False, str(error)), None)
        best = found.roomy(self._slack)
        verdict = worth(self.trigger.rules, old.step_ns if old else None, best.step_ns)
        if verdict.switch:
            self._take(best)
        return Advice(reason, verdict, found)

    def saved(self) -> dict[str, Any]:
        """The whole state, for a file, including the plan in force."""
        now = self._now
        return {"calibrator": self.calibrator.saved(), "trigger": self.trigger.saved(),
                "layout": [*astuple(now.layout)] if now else None,
                "degrees": list(self._degrees), "since": self._since, "sums": list(self._sums)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the state that `saved` returned.

        If the plan in force cannot run any more, `now` is None and `preflight` is due.
        """
        self.calibrator.load(saved["calibrator"])
        self.trigger.load(saved["trigger"])
        history = list(self.trigger.history)
        if saved["layout"] and history:
            self._degrees = tuple(saved["degrees"])
            costs, search = self._believed(history)
            self._now = reprice(costs, self._gpus, Layout(*saved["layout"]), self._degrees,
                                 search)
            self._since = int(saved.get("since", self._since))
            said, took, steps = saved.get("sums", self._sums)
            self._sums = int(said), int(took), int(steps)

    def _believed(self, history: Sequence[Request]) -> tuple[Costs, Search]:
        """Returns costs with the learned factors, and the search with the learned routing loss."""
        learned = self.calibrator
        return (self._priced(history, learned.factors()),
                replace(self._search, loss=learned.loss(self._search.loss)))

    def _take(self, best: Split) -> None:
        self._now, self._degrees = best, tuple(one.degree for one in best.instances)
        self._since, self._sums = 0, (0, 0, 0)

    def _learn(self, facts: StepFacts, requests: Sequence[Request],
               rollouts: Mapping[int, int]) -> None:
        """Compares the measured times with the bare model's for the requests of this step."""
        if not requests or self._now is None:
            return
        bare = self._priced(requests, Factors())
        mean = sum(r.total for r in requests) / len(requests)
        modelled = reprice(bare, self._gpus, self._now.layout, self._degrees, self._search)
        if modelled is None:
            return
        self.calibrator.observe(TRAIN, modelled.price.ns, facts.train_ns, mean)
        if not self.settled:
            return
        self._learn_plan(modelled.rollout_ns, facts.rollout_ns, mean)
        longer = (1 + self._search.loss) * self.calibrator.beside() if self.mixed else 1.0
        for degree, measured in rollouts.items():
            said = max((x.ns for x in modelled.instances if x.degree == degree), default=0)
            self.calibrator.observe(degree, round(said * longer), measured, mean)

    def _learn_plan(self, said_ns: int, took_ns: int, mean: float) -> None:
        """Compares a plan's modelled rollout time with the measured one.

        Where batches mix, both are summed over as many steps as mix, because the times of single
        steps would mislead.
        """
        said, took, steps = self._sums
        said, took, steps = said + said_ns, took + took_ns, steps + 1
        # A loss of 0 means that the router knows all lengths.
        if steps == self._lag and self._search.loss:
            self.calibrator.observe_plan(self.mixed, said, took, mean)
        self._sums = (said, took, steps) if steps < self._lag else (0, 0, 0)
