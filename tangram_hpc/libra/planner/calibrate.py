"""Pure. Corrects the cost model by measured times: one factor for training, one per rollout degree.

A factor is the moving average of measured time over modelled time. It follows slowly while nothing
changes and fast after a change point, that is, when the error or the mean length of the requests
leaves `sigma` standard deviations of its recent past. The weights 0.1 and 0.8 and the 3 sigma are
Libra's. Two details are ours: the first samples have equal weights, and the past is forgotten at a
change point, so that a false alarm is soon corrected.

How well a router distributes requests over instances of several degrees says nothing about a single
degree. It is learned separately, from whole plans of each kind (`UNIFORM`, `MIXED`), and forgotten
when it is old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

from .shapes import Factors

TRAIN = 0  # key of training; rollout degrees are their own keys
UNIFORM, MIXED = -1, -2  # keys of whole plans with one degree, and with several degrees
_PRIOR = 1  # the weight of the prior, in mixed samples
_LEAST_LOSS = 0.001  # equal instances are examined only while the loss is not 0
_LEAST_SHARE = 0.01  # least relative deviation; equal samples would have none


@dataclass(frozen=True)
class Learning:
    """How fast factors follow measurements.

    Attributes:
        slow: Weight of a new sample in normal times.
        fast: Weight of a new sample at a change point.
        sigma: How many standard deviations make a change point.
        least: Number of samples before a change point can be detected.
        window: Number of samples that are the recent past.
    """

    slow: float = 0.1
    fast: float = 0.8
    sigma: float = 3.0
    least: int = 8
    window: int = 64


@dataclass
class _Past:
    """The recent values of one quantity."""

    values: deque[float]

    def left_by(self, value: float, rules: Learning, scale: float) -> bool:
        """Whether `value` lies outside of the range of the recent past."""
        n = len(self.values)
        if n < rules.least:
            return False
        mean = sum(self.values) / n
        deviation = sqrt(sum((v - mean) ** 2 for v in self.values) / n)
        return abs(value - mean) > rules.sigma * max(deviation, _LEAST_SHARE * scale)


@dataclass
class _Track:
    """One factor and its recent past.

    Attributes:
        factor: Measured time over modelled time, as believed now.
        samples: Number of samples since the last change point.
        errors: Recent relative errors of the factor.
        lengths: Recent mean lengths of requests, in tokens.
        changes: Number of change points so far.
        age: For `MIXED`: uniform plans that were measured since the last mixed one.
    """

    factor: float
    samples: int
    errors: _Past
    lengths: _Past
    changes: int = field(default=0)
    age: int = field(default=0)


class Calibrator:
    """All factors, fed with measured steps."""

    def __init__(self, rules: Learning | None = None) -> None:
        self._rules = rules or Learning()
        self._tracks: dict[int, _Track] = {}

    def observe(self, key: int, modelled_ns: int, measured_ns: int, mean_tokens: float) -> bool:
        """Takes one measured time; returns whether it is a change point. O(window).

        Times that are not positive and finite are ignored.

        Args:
            key: `TRAIN`, a rollout degree, `UNIFORM` or `MIXED`.
            modelled_ns: The modelled time without any factor.
            measured_ns: The measured time.
            mean_tokens: Mean length of the requests, in tokens.
        """
        if not (0 < modelled_ns < inf and 0 < measured_ns < inf):  # also false for NaN
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
        """Takes the measured rollout time of a whole plan. O(window).

        The times of mixed plans are forgotten after `window` uniform plans, or at a change point of
        these; then a mixed plan may be tried again.

        Args:
            mixed: Whether the plan has instances of several degrees.
            modelled_ns: The modelled time without any factor; for a mixed plan with the routing
                loss that was believed at first.
            measured_ns: The measured time.
            mean_tokens: Mean length of the requests, in tokens.
        """
        if mixed:
            self.observe(MIXED, modelled_ns, measured_ns, mean_tokens)
        changed = not mixed and self.observe(UNIFORM, modelled_ns, measured_ns, mean_tokens)
        old = self._tracks.get(MIXED)
        if old is not None:
            old.age = 0 if mixed else old.age + 1
            if changed or old.age >= self._rules.window:
                del self._tracks[MIXED]

    def beside(self) -> float:
        """How many times longer mixed plans took than modelled, relative to uniform plans.

        The result is 1 if no mixed plan was measured. While no uniform plan was measured, uniform
        plans are believed to be no slower than modelled. So a uniform plan is soon tried, and then
        both times are known. The rest of a degree's time is learned by the degree's own factor.
        """
        mixed, uniform = self._tracks.get(MIXED), self._tracks.get(UNIFORM)
        if mixed is None:
            return 1.0
        return mixed.factor / uniform.factor if uniform else max(1.0, mixed.factor)

    def mixed(self) -> float:
        """Returns the result of `beside`, pulled towards 1 while there are few samples of mixed
        plans."""
        samples = self._tracks[MIXED].samples if MIXED in self._tracks else 0
        return float(self.beside() ** (samples / (samples + _PRIOR)))

    def loss(self, routing: float) -> float:
        """Returns the learned routing loss, where `routing` is the loss that was assumed at first.

        An assumed loss of 0 means that lengths are known, and stays 0. Otherwise the result is at
        least 0.001 once mixed plans were measured, even if the router seems to lose nothing.
        """
        mixed = self.mixed()
        return max(_LEAST_LOSS, (1 + routing) * mixed - 1) if routing and mixed != 1 else routing

    def changes(self, key: int) -> int:
        """Number of change points of a key so far."""
        return self._tracks[key].changes if key in self._tracks else 0

    def factors(self) -> Factors:
        """Returns the factors of measured over modelled time, as learned so far."""
        train = self._tracks[TRAIN].factor if TRAIN in self._tracks else 1.0
        return Factors(train, tuple((key, self._tracks[key].factor)
                                    for key in sorted(self._tracks) if key > TRAIN))

    def saved(self) -> dict[str, Any]:
        """The whole state, for a file."""
        return {str(key): {"factor": t.factor, "samples": t.samples, "changes": t.changes,
                           "age": t.age, "errors": list(t.errors.values),
                           "lengths": list(t.lengths.values)}
                for key, t in self._tracks.items()}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores the state that `saved` returned."""
        for key, told in saved.items():
            track = self._new(told["errors"], told["lengths"])
            track.factor, track.samples = float(told["factor"]), int(told["samples"])
            track.changes, track.age = int(told["changes"]), int(told.get("age", 0))
            self._tracks[int(key)] = track

    def _new(self, errors: Iterable[float] = (), lengths: Iterable[float] = ()) -> _Track:
        window = self._rules.window
        return _Track(1.0, 0, _Past(deque(errors, window)), _Past(deque(lengths, window)))
