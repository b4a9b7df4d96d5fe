"""Pure. One trajectory of the reference trainer: the model's turns, and the tool's returns between.

Law: what the tool returned decides whether and how the trajectory goes on: a right answer ends it,
a wrong number is asked for once more, a program that does not even run is mended until `TURNS` are
over; saying nothing is giving up. Only what the model wrote is learnt from: `learnt` is true for
exactly its tokens, and each of them has the log-probability with which it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import reference_task as task

TURNS = 4
WRONGS = 2  # numbers that are not the right one
FADE = 0.9  # of the reward, for each turn after the first


@dataclass
class Trajectory:
    """From a question to its answer, or to giving up.

    Attributes:
        tokens: all of it so far, the tool's too; the next turn's context.
        learnt, logprobs: of each token whether the model wrote it, and how likely it was then.
        worths: what each turn's program was worth, 0 for none.
        wrongs: programs that made a number, and not the one that was asked for.
        version: the oldest weights that wrote any of it.
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
        """It begins with its question."""
        if not self.tokens:
            self._read(task.question(self.prompt))

    @property
    def turns(self) -> int:
        """Those that the model has written."""
        return len(self.worths)

    @property
    def generated(self) -> int:
        """Tokens that the model has written."""
        return sum(self.learnt)

    @property
    def reward(self) -> float:
        """What its last program was worth, less for each turn that it took."""
        return self.worths[-1] * FADE ** (self.turns - 1) if self.worths else 0.0

    def said(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> str:
        """The model wrote a turn; the program in it, empty if it gave up (and it is over)."""
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
        """The tool's return to that program: it is over, or goes on with the tool's words."""
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


def credits(group: Sequence[Trajectory]) -> list[list[float]]:
    """The advantage of each token of each trajectory of one prompt; 0 for what the model did not
    write. Each turn stands for itself: its program's worth among those of all turns of the group
    (GRPO with process supervision, arXiv 2402.03300, section 4.1.3, without its sum over later
    turns: who fails first and is right then has not to thank the failure)."""
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
    if variance <= 1e-12 * float((values**2).mean()):  # so small a spread is rounding
        return [0.0] * len(worths)
    advantages: list[float] = (centred / (variance**0.5 + 1e-6)).tolist()
    return advantages
