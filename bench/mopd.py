"""A scaled-down `mopd` for the live bench: its models, its texts, and when which teacher is called.

The shape, after `mopd-512`: nine teachers. Of a teacher's calls 70% come in one pulse, normal about
its middle; pulse follows pulse, teacher by teacher, and overlaps with the next at its foot (sd a
quarter of the distance between two; in `mopd-512` 0.4, but there a pulse is worth four of ten
devices, and with three it would hardly fill one). The other 30% come at any time. Work is
log-normal (sigma 0.48): a call's work is the length of its text. With the bench's texts a restore
costs a third to a half of a call; ARL-Tangram's production figures are 0.20 s and 0.62 s (§6).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

IN_PULSE, SD, SIGMA = 0.7, 0.25, 0.48
LENGTHS = (0.25, 3.0)  # shortest and longest text, of the mean


@dataclass(frozen=True)
class Timed:
    """A call: when it is submitted (seconds from the start of a round), whose, and with what."""

    at_s: float
    teacher: int
    prompt: str
    completion: str


def schedule(seed: int, teachers: int, calls: int, span_s: float, length: int) -> list[Timed]:
    """One round: `calls` of each teacher within `span_s`, texts of `length` bytes on average."""
    draw = random.Random(seed)
    text = _text()
    every = span_s / teachers
    timed = []
    for teacher in range(teachers):
        for n in range(calls):
            at = (draw.gauss((teacher + 0.5) * every, SD * every) if n < round(IN_PULSE * calls)
                  else draw.uniform(0, span_s))
            drawn = draw.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
            size = max(4, round(length * min(max(drawn, LENGTHS[0]), LENGTHS[1])))
            start = draw.randrange(len(text) - size)
            timed.append(Timed(min(max(at, 0.0), span_s), teacher,
                               text[start:start + size // 2], text[start + size // 2:start + size]))
    return sorted(timed, key=lambda call: call.at_s)


def make_models(home: Path, teachers: int, hidden: int, layers: int) -> list[Path]:
    """Teachers with weights of their own, random."""
    from tangram_hpc.services.torch.tiny import make_tiny

    return [make_tiny(home / f"teacher-{n}", seed=n, hidden=hidden, layers=layers)
            for n in range(teachers)]


def differences(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference of any two logprobs of the same call.

    Raises:
        ValueError: two answers are not of one shape.
    """
    return max((abs(a - b) for mine, yours in zip(one, other, strict=True)
                for x, y in zip(mine, yours, strict=True)
                for a, b in zip(x.tolist(), y.tolist(), strict=True)), default=0.0)


def mean(numbers: Sequence[float]) -> float:
    """Of none: 0."""
    return statistics.fmean(numbers) if numbers else 0.0


def _text() -> str:
    """What Python's own manual says, in ASCII, so that a byte is a token."""
    return "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
