"""A smaller version of the workload `mopd-512` for the live benchmark: models, texts, call times.

There are nine teachers, as in `mopd-512`. Of a teacher's calls 70 % come in one pulse, with times
drawn from a normal distribution. The pulses of the teachers follow each other and overlap a little:
the standard deviation is a quarter of the distance between two pulses. (In `mopd-512` it is 0.4 of
the distance. There a pulse needs four of ten devices; with three devices such a pulse would hardly
fill one.) The other 30 % come at any time. Work is log-normal (sigma 0.48): a call's work is the
length of its text. With these texts a restore takes a third to a half of the time of a call;
ARL-Tangram's production figures are 0.20 s for a restore and 0.62 s for a call (§6).
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
LENGTHS = (0.25, 3.0)  # shortest and longest text, as factors of the mean


@dataclass(frozen=True)
class Timed:
    """A call: its submit time (seconds from the start of a round), its teacher and its text."""

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
    """Returns the mean; 0 for no numbers."""
    return statistics.fmean(numbers) if numbers else 0.0


def _text() -> str:
    """Returns the text of Python's own documentation as ASCII, so that each byte is a token."""
    return "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
