"""The faults of a simulated RL run, drawn from a seed alone.

The same seed and rates give the same faults at the same times for every simulated system, but which
of the living nodes dies depends on the run. A rollout node that dies loses its engines, or its
place in training if it is lent, and its caches; it comes back empty. An optimizer step that fails
is repeated from its beginning. A tool call that never returns is given up after a time, and its
trajectory gets a timeout as its result. A rate of 0 draws nothing. A run in which so many faults
happen that no batch is trained ends with a message of one line.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from ...errors import InvalidInput
from ...scheduler.routing.cmlfq import TIMEOUT
from .rl_lengths import TrajectoryLengths

_SECOND = 10**9
FAULTS_MAX = 10_000  # most faults between two trained batches; tools do not count


@dataclass(frozen=True)
class Faults:
    """How often faults happen.

    Attributes:
        node_s, engine_s: Mean seconds between two deaths of whole rollout nodes and of single
            engines; 0 for none.
        back_s: Seconds until a dead node or engine serves again.
        step: The fraction of optimizer steps that fail at their end.
        tool: The fraction of tool calls that never return.
        tool_timeout_s: Seconds after which such a call is given up.
    """

    node_s: float = 0.0
    engine_s: float = 0.0
    back_s: float = 120.0
    step: float = 0.0
    tool: float = 0.0
    tool_timeout_s: float = 60.0


class Fate:
    """Draws and counts the faults of one run."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self._seed = seed
        # one generator each, so that fault times do not depend on the system
        self._nodes = random.Random(f"nodes/{seed}")
        self._engines = random.Random(f"engines/{seed}")
        self._choices = random.Random(f"choices/{seed}")
        self._steps = random.Random(f"steps/{seed}")
        self.nodes = self.engines = self.steps = self.tools = 0  # how many faults happened
        self._since = Counter[str]()  # faults since a batch was trained, by field

    def next_node_ns(self) -> int | None:
        """Time until the next node dies, in ns; None if none does. Raises as `_happens` does."""
        return self._next("node_s", self._nodes)

    def next_engine_ns(self) -> int | None:
        """Time until the next engine dies, in ns; None if none does. Raises as `_happens` does."""
        return self._next("engine_s", self._engines)

    @property
    def back_ns(self) -> int:
        """How long a dead node or engine is away."""
        return round(self.faults.back_s * _SECOND)

    def one_of(self, choices: list[int]) -> int:
        """Chooses the node or engine that dies."""
        return self._choices.choice(choices)

    def step_fails(self) -> bool:
        """Whether the optimizer step that ends now has failed. Raises as `_happens` does."""
        failed = self._steps.random() < self.faults.step
        self.steps += failed
        if failed:
            self._happens("step")
        return failed

    def with_tools(self, one: TrajectoryLengths, key: str) -> TrajectoryLengths:
        """Returns the trajectory with its tool faults: the tool calls that never return end as
        timeouts.
        """
        if not self.faults.tool:
            return one
        rng = random.Random(f"tools/{self._seed}/{key}")
        late = round(self.faults.tool_timeout_s * _SECOND)
        turns = tuple(turn._replace(tool_ns=late, status=TIMEOUT)
                      if rng.random() < self.faults.tool else turn for turn in one.turns)
        self.tools += sum(a is not b for a, b in zip(turns, one.turns, strict=True))
        return replace(one, turns=turns)

    def trained(self) -> None:
        """Notes that a batch was trained: the count of faults since the last batch begins anew."""
        self._since.clear()

    def _next(self, field: str, rng: random.Random) -> int | None:
        mean_s = getattr(self.faults, field)
        if not mean_s:
            return None
        self._happens(field)
        return max(1, round(rng.expovariate(1 / mean_s) * _SECOND))

    def _happens(self, field: str) -> None:
        """Counts one more fault.

        Raises:
            InvalidInput: So many faults came since a batch was trained that the run would not end;
                the message names the field to change.
        """
        self._since[field] += 1
        if self._since.total() > FAULTS_MAX:
            most, told = self._since.most_common(1)[0][0], self.faults
            rest = ("lower it" if most == "step" else
                    f"raise it, or lower `faults.back_s` ({told.back_s:g})")
            raise InvalidInput(f"scenario: field `faults.{most}`: {getattr(told, most):g}: "
                               f"{FAULTS_MAX} faults came and no batch was trained; {rest}")
