"""Simulated trajectories whose tool returns hint at their lengths.

A trajectory goes through phases, the larger ones first. The tool return that begins a phase shows
which phase it is, and the phase decides how many tokens are generated in it; further returns within
a phase say nothing new. A setback begins the largest phase again, and a misleading return looks
like that of another phase. A router learns the tool returns, never the number of remaining tokens.
Everything is drawn from a seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from ...scheduler.routing.cmlfq import FAILURE, SUCCESS, TIMEOUT

CHARS_PER_TOKEN = 4
_SECOND = 10**9


class TurnLengths(NamedTuple):
    """`generated` tokens are generated, then a tool runs and returns something.

    Attributes:
        generated: Tokens that are generated before the tool call.
        tool: Name of the tool.
        chars, tokens: Length of what the tool returns.
        status: SUCCESS, FAILURE or TIMEOUT of `scheduler/routing/cmlfq.py`.
        tool_ns: How long the tool runs.
    """

    generated: int
    tool: str
    chars: int
    tokens: int
    status: int
    tool_ns: int


@dataclass(frozen=True)
class TrajectoryLengths:
    """One trajectory of a prompt: turns that each end with a tool call, then `last` tokens."""

    prompt: int
    prompt_tokens: int
    turns: tuple[TurnLengths, ...]
    last: int

    @property
    def generated(self) -> int:
        """All tokens that are generated."""
        return self.last + sum(t.generated for t in self.turns)

    @property
    def read(self) -> int:
        """All tokens that are read: the prompt and the tool returns."""
        return self.prompt_tokens + sum(t.tokens for t in self.turns)

    @property
    def tool_ns(self) -> int:
        """The time of all tools together."""
        return sum(t.tool_ns for t in self.turns)


@dataclass(frozen=True)
class Phase:
    """A part of a trajectory. Pairs are values at the beginning and at the end of the run.

    Attributes:
        name, tool: Name of the phase, and of the tool that its turns call.
        weight: Weight of this phase among those with which trajectories begin.
        tokens: Mean of tokens that are generated in it.
        turns: Mean number of its turns.
        payload: Mean tokens of the return that begins it.
        steady: Mean tokens of its other returns.
        failure: Probability that the return that begins it is a failure or a timeout.
        spread: Standard deviation of the logarithm of its tokens.
    """

    name: str
    tool: str
    weight: tuple[float, float]
    tokens: tuple[float, float]
    turns: int
    payload: int
    steady: int = 150
    failure: float = 0.0
    spread: float = 0.12


@dataclass(frozen=True)
class Causes:
    """How trajectories are drawn.

    Means are those of log-normal draws; shares lie between 0 and 1.
    """

    phases: tuple[Phase, ...]  # the shortest phase first; it ends every trajectory
    prompts: int
    prompt_tokens: int = 1200
    first_tokens: int = 200  # tokens before the first tool return
    tilt: float = 0.7  # how much prompts differ, in log odds of the next larger phase
    setback: float = 0.01  # fraction of turns after which the largest phase begins again
    misled: float = 0.02  # fraction of phases that begin with another phase's return
    tool_s: float = 1.5
    tool_spread: float = 0.8
    generated_max: int = 40_000


def three_phases(spread: float, prompts: int) -> Causes:
    """Phases explore, repair and finish; mean lengths grow from 2,500 tokens to 11,500.

    The larger `spread`, the less a tool's return tells about the number of tokens that follow.
    """
    return Causes(
        phases=(
            Phase("finish", "tests", (0.76, 0.38), (900, 2800), 3, 150, spread=spread),
            Phase("repair", "shell", (0.18, 0.34), (2500, 5000), 4, 1400, failure=0.8,
                  spread=spread),
            Phase("explore", "search", (0.06, 0.28), (8000, 16000), 9, 5000, failure=0.1,
                  spread=spread)),
        prompts=prompts, setback=0.002, misled=0.01)


class Source:
    """Draws the trajectories of one run from a seed."""

    def __init__(self, causes: Causes, seed: int) -> None:
        self.causes = causes
        rng = random.Random(seed)
        self._seed = seed
        self._hard = [rng.gauss(0, 1) * causes.tilt for _ in range(causes.prompts)]

    def trajectory(self, prompt: int, sample: int, progress: float) -> TrajectoryLengths:
        """One sample of a prompt at this progress (0 to 1) of the run.

        The same arguments always give the same trajectory, in any order of calls.
        """
        c = self.causes
        rng = random.Random(f"{self._seed}/{prompt}/{sample}")
        read = max(1, round(_lognormal(rng, c.prompt_tokens, 0.3)))
        level = self._first(rng, prompt, progress)
        turns: list[TurnLengths] = []
        spent, chunk, begins = 0, max(1, round(_lognormal(rng, c.first_tokens, 0.2))), True
        left = self._tokens(rng, level, progress)
        while spent + chunk < c.generated_max:
            turns.append(self._turn(rng, chunk, level, begins))
            spent += chunk
            mean = _mean(c.phases[level], progress) / c.phases[level].turns
            chunk, begins = max(1, round(_lognormal(rng, mean, 0.25))), False
            if chunk * 3 // 2 < left:
                left -= chunk
                if rng.random() < c.setback and level < len(c.phases) - 1:
                    level, begins = len(c.phases) - 1, True
                    left = self._tokens(rng, level, progress)
                continue
            chunk = max(1, left)
            if level == 0:
                break
            level, begins = level - 1, True
            left = self._tokens(rng, level, progress)
        return TrajectoryLengths(prompt, read, tuple(turns),
                                 max(1, min(chunk, c.generated_max - spent)))

    def _first(self, rng: random.Random, prompt: int, progress: float) -> int:
        phases = self.causes.phases
        weights = [p.weight[0] + (p.weight[1] - p.weight[0]) * progress for p in phases]
        weights = [w * exp(self._hard[prompt] * i) for i, w in enumerate(weights)]
        return rng.choices(range(len(phases)), weights)[0]

    def _tokens(self, rng: random.Random, level: int, progress: float) -> int:
        phase = self.causes.phases[level]
        return max(1, round(_lognormal(rng, _mean(phase, progress), phase.spread)))

    def _turn(self, rng: random.Random, generated: int, level: int, begins: bool) -> TurnLengths:
        c = self.causes
        shown = c.phases[level]
        tokens, status = shown.steady, SUCCESS
        if begins:
            if rng.random() < c.misled:
                shown = rng.choice(c.phases)
            tokens = shown.payload
            if rng.random() < shown.failure:
                status = TIMEOUT if rng.random() < 0.2 else FAILURE
        tokens = max(1, round(_lognormal(rng, tokens, 0.15)))
        tool_ns = round(_lognormal(rng, c.tool_s, c.tool_spread) * _SECOND)
        return TurnLengths(generated, shown.tool, tokens * CHARS_PER_TOKEN, tokens, status, tool_ns)


def shuffled(trajectories: Sequence[TrajectoryLengths], seed: int) -> list[TrajectoryLengths]:
    """The same lengths, with all returns (tool, size, status) shuffled over all trajectories.

    Then returns say nothing about lengths.
    """
    rng = random.Random(seed)
    deck = [(t.tool, t.chars, t.tokens, t.status) for one in trajectories for t in one.turns]
    rng.shuffle(deck)
    cards = iter(deck)
    return [TrajectoryLengths(one.prompt, one.prompt_tokens,
                              tuple(TurnLengths(t.generated, *next(cards), t.tool_ns)
                                    for t in one.turns),
                              one.last)
            for one in trajectories]


def _mean(phase: Phase, progress: float) -> float:
    """Mean tokens of a phase at this progress, interpolated geometrically."""
    first, last = phase.tokens
    return exp(log(first) + (log(last) - log(first)) * progress)


def _lognormal(rng: random.Random, mean: float, spread: float) -> float:
    """A log-normal draw with this mean."""
    return rng.lognormvariate(log(mean) - spread * spread / 2, spread)
