"""One trajectory of the reference trainer: turns of the model, with returns of the tool between
them. The module does no I/O.

The tool's return decides how the trajectory goes on: a right answer ends it, after a wrong number
the model may try once more, and after a program that does not run it may try until `TURNS` turns
are over. An empty turn ends the trajectory too. Only the model's own tokens are trained on:
`learnt` is true for exactly these, and each has the log-probability with which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import reference_task as task

TURNS = 4
WRONGS = 2  # wrong numbers after which a trajectory ends
FADE = 0.9  # factor of the reward for each turn after the first


@dataclass
class ArithmeticTrajectory:
    """A trajectory, from its prompt to its end.

    Attributes:
        prompt: the prompt that it began with.
        tokens: all tokens so far, the tool's included; the context of the next turn.
        learnt: for each token, whether the model wrote it.
        logprobs: for each token that the model wrote, its log-probability then; 0 for others.
        worths: the reward of each turn's program; 0 for a turn without a program.
        wrongs: how many programs had a value, but not the right one.
        version: the version of the oldest weights that wrote a part of it.
        over: whether it has ended.
    """

    prompt: str
    tokens: list[int] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    worths: list[float] = field(default_factory=list)
    wrongs: int = 0
    version: int = 1 << 62
    over: bool = False

    def __post_init__(self) -> None:
        if not self.tokens:
            self._read(task.question(self.prompt))

    @property
    def turns(self) -> int:
        """How many turns the model has written."""
        return len(self.worths)

    @property
    def generated(self) -> int:
        """How many tokens the model has written."""
        return sum(self.learnt)

    @property
    def reward(self) -> float:
        """The reward of the last program, times `FADE` for each turn after the first."""
        return self.worths[-1] * FADE ** (self.turns - 1) if self.worths else 0.0

    def said(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> str:
        """Adds a turn of the model. Returns the program in it; an empty one ends the trajectory."""
        assert not self.over and 0 < len(tokens) == len(logprobs)
        self.version = min(self.version, version)
        self.tokens += tokens
        self.logprobs += logprobs
        self.learnt += [True] * len(tokens)
        self.worths.append(0.0)
        program = task.text_of(tokens)
        self.over = not program
        return program

    def returned(self, exit_code: int, said: bytes) -> None:
        """Adds the tool's return to that program, which may end the trajectory."""
        assert not self.over
        made = task.value(exit_code, said)
        worth = self.worths[-1] = task.reward(self.prompt, made)
        self.wrongs += made is not None and worth < 1
        self.over = worth == 1 or self.turns == TURNS or self.wrongs == WRONGS
        if not self.over:
            self._read(task.reply(self.prompt, made))

    def _read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.learnt += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


def credits(group: Sequence[ArithmeticTrajectory]) -> list[list[float]]:
    """Returns the advantage of each token of all trajectories of one prompt.

    Tokens of the prompt and of the tool have advantage 0. All tokens of a turn have the same one,
    which compares the reward of the turn's program with those of all turns of the group. This is
    GRPO with process supervision (arXiv 2402.03300, section 4.1.3), but without the sum over later
    turns: a wrong turn gets no credit for a right one after it."""
    worth = iter(_advantages([w for one in group for w in one.worths]))
    told = []
    for one in group:
        row, before, now = [], False, 0.0
        for mine in one.learnt:
            if mine and not before:
                now = next(worth)
            row.append(now if mine else 0.0)
            before = mine
        told.append(row)
    return told


def _advantages(worths: Sequence[float]) -> list[float]:
    """(worth - mean) / standard deviation; all 0 where the worths do not differ."""
    if not worths:
        return []
    values = np.asarray(worths, dtype=np.float64)
    centred = values - values.mean()
    variance = float((centred**2).mean())
    if variance <= 1e-12 * float((values**2).mean()):  # a variance this small is rounding error
        return [0.0] * len(worths)
    advantages: list[float] = (centred / (variance**0.5 + 1e-6)).tolist()
    return advantages
