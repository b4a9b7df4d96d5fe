"""Pure. What steps really took, against what the model said: one factor for training, one for
each rollout degree, and what plans of several degrees take beyond those of one.

Law: a factor is a moving average of measured over modelled time, slow as long as all is as it was
and fast after a change point: when the error, or the mean length of the requests, leaves `sigma`
deviations of its recent past. (Libra: 0.1, 0.8, 3 sigma; that the first samples weigh alike, and
that the past is forgotten at a change point, is ours: a wrong alarm is soon mended.) How well a
router deals requests to instances of several degrees says nothing of a degree: it is learned apart,
from whole plans of each kind, and forgotten when it is old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from .shapes import Factors

TRAIN = 0  # the key of training among rollout degrees
UNIFORM, MIXED = -1, -2  # the keys of whole plans: instances of one degree, of several
_PRIOR = 1  # measured mixtures that weigh as much as what was believed of them before
_LEAST_LOSS = 0.001  # alike instances are looked at as long as there is some
_LEAST_SHARE = 0.01  # a deviation is taken for at least so much, relative


@dataclass(frozen=True)
class Learning:
    """How factors follow what is measured."""

    slow: float = 0.1
    fast: float = 0.8
    sigma: float = 3.0
    least: int = 8  # samples before a change point can be told
    window: int = 64  # samples that are the recent past


@dataclass
class _Past:
    """Recent values of one kind."""

    values: deque[float]

    def left_by(self, value: float, rules: Learning, scale: float) -> bool:
        """Whether this value lies outside of the recent past."""
        n = len(self.values)
        if n < rules.least:
            return False
        mean = sum(self.values) / n
        deviation = sqrt(sum((v - mean) ** 2 for v in self.values) / n)
        return abs(value - mean) > rules.sigma * max(deviation, _LEAST_SHARE * scale)


@dataclass
class _Track:
    """One factor and its recent past."""

    factor: float
    samples: int
    errors: _Past
    lengths: _Past
    changes: int = field(default=0)
    age: int = field(default=0)  # of mixtures: uniform plans measured since the last one


class Calibrator:
    """The factors, fed with measured steps."""

    def __init__(self, rules: Learning | None = None) -> None:
        self._rules = rules or Learning()
        self._tracks: dict[int, _Track] = {}

    def observe(self, key: int, modelled_ns: int, measured_ns: int, mean_tokens: float) -> bool:
        """One measured time of `TRAIN` or of rollout instances of a degree; `modelled_ns` is
        without any factor. Returns whether it is a change point. What is not positive says
        nothing and is ignored. O(window)."""
        if modelled_ns <= 0 or measured_ns <= 0:
            return False
        track = self._tracks.setdefault(key, self._new())
        ratio = measured_ns / modelled_ns
        error = ratio / track.factor - 1
        changed = (track.errors.left_by(error, self._rules, 1.0)
                   or track.lengths.left_by(mean_tokens, self._rules, abs(mean_tokens)))
        if changed:
            track.errors.values.clear()
            track.lengths.values.clear()
            track.changes += 1
            track.samples = 0
        track.samples += 1
        weight = self._rules.fast if changed else max(self._rules.slow, 1 / track.samples)
        track.factor += weight * (ratio - track.factor)
        track.errors.values.append(error)
        track.lengths.values.append(mean_tokens)
        return changed

    def observe_plan(self, mixed: bool, modelled_ns: int, measured_ns: int,
                     mean_tokens: float) -> None:
        """What the rollouts of a whole plan took; `mixed`: it has several degrees. `modelled_ns` is
        without any factor, of a mixture with the routing loss that was believed at first. What
        mixtures took is forgotten after `window` uniform plans or a change point of these: then
        another may be tried. O(window)."""
        if mixed:
            self.observe(MIXED, modelled_ns, measured_ns, mean_tokens)
        changed = not mixed and self.observe(UNIFORM, modelled_ns, measured_ns, mean_tokens)
        old = self._tracks.get(MIXED)
        if old is not None:
            old.age = 0 if mixed else old.age + 1
            if changed or old.age >= self._rules.window:
                del self._tracks[MIXED]

    def beside(self) -> float:
        """By which plans of several degrees took longer than was said, beside those of one; 1 if
        none was measured. Till a uniform one was, they are believed to be no slower than said: then
        one is soon tried, and both are known. What a degree takes beyond this is its own."""
        mixed, uniform = self._tracks.get(MIXED), self._tracks.get(UNIFORM)
        if mixed is None:
            return 1.0
        return mixed.factor / uniform.factor if uniform else max(1.0, mixed.factor)

    def mixed(self) -> float:
        """As much of `beside` as is believed after so many samples."""
        samples = self._tracks[MIXED].samples if MIXED in self._tracks else 0
        return float(self.beside() ** (samples / (samples + _PRIOR)))

    def loss(self, routing: float) -> float:
        """The routing loss as learned where one of `routing` was believed at first; 0 stays 0:
        there lengths are known. A router that does better than that is not believed."""
        mixed = self.mixed()
        return max(_LEAST_LOSS, (1 + routing) * mixed - 1) if routing and mixed != 1 else routing

    def changes(self, key: int) -> int:
        """Change points so far."""
        return self._tracks[key].changes if key in self._tracks else 0

    def factors(self) -> Factors:
        """What is believed now."""
        train = self._tracks[TRAIN].factor if TRAIN in self._tracks else 1.0
        return Factors(train, tuple((key, self._tracks[key].factor)
                                    for key in sorted(self._tracks) if key > TRAIN))

    def saved(self) -> dict[str, Any]:
        """All that it knows, for a file."""
        return {str(key): {"factor": t.factor, "samples": t.samples, "changes": t.changes,
                           "age": t.age, "errors": list(t.errors.values),
                           "lengths": list(t.lengths.values)}
                for key, t in self._tracks.items()}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes on from what `saved` gave."""
        for key, told in saved.items():
            track = self._new(told["errors"], told["lengths"])
            track.factor, track.samples = float(told["factor"]), int(told["samples"])
            track.changes, track.age = int(told["changes"]), int(told.get("age", 0))
            self._tracks[int(key)] = track

    def _new(self, errors: Iterable[float] = (), lengths: Iterable[float] = ()) -> _Track:
        window = self._rules.window
        return _Track(1.0, 0, _Past(deque(errors, window)), _Past(deque(lengths, window)))
