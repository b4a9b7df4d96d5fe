"""Pure. Computes the least period with which a rollout instance keeps up where batches overlap.

Where batches mix, trajectories of the next batches begin while the longest ones of earlier batches
still run. In each period one batch's requests come to the instance. The batch's last trajectory
must end within `ahead + 1` periods less the training step, because the batch that is `ahead` later
begins when this one has been trained. In a period of P seconds the instance makes S decode steps. A
step takes P / S, a request of g tokens takes g P / S plus the time of its prompt and its tools, and
about tokens / S requests run at once, which the cache and the engine must hold. With fewer steps
more sequences share each reading of the weights; with more steps a request ends sooner. The least
period belongs to the fewest steps with which all requests end in time. For this bound, the most
tokens, the longest prompt and the longest tools of all requests count as those of a single one (the
mean of a processor-sharing queue; Kleinrock, Queueing Systems II, section 4.4).

Invariants: a function of its arguments; more requests, or a longer training step, never lower it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .lengths import Ints, Strata
from .rollout_cost import RolloutCost, spans, tops
from .shapes import NEVER, SECOND

_HALVINGS = 44  # bisections, which resolve a nanosecond of a day


class FlowCost:
    """The periods of instances of one degree, for one batch in strata."""

    def __init__(self, cost: RolloutCost, degree: int, strata: Strata) -> None:
        """Computes sums over the batch. O(strata ** 2)."""
        self._cost, self._degree, self._n = cost, degree, len(strata)
        room = cost.kv_tokens(degree)
        self._most = most = int(np.searchsorted(strata.totals, room, "right")) if room else 0
        if not most:
            return
        end = strata.begin(most)
        prompt = strata.prompt[:end]
        beside = strata.tool_ns[:end] / SECOND + cost.prefill_s(degree, prompt, prompt * prompt)
        self._beside = tops(np.maximum.reduceat(beside, strata.starts[:most]), most)
        self._longest = tops(strata.longest, most)
        self._tokens = spans(strata.tokens, most)
        self._areas = spans(strata.areas, most) / 2
        self._read = cost.prefill_s(degree, spans(strata.prompts, most),
                                    spans(strata.squares, most))
        self._packed = np.maximum(self._areas / room, self._tokens / cost.rollout.max_batch)

    def matrix(self, ahead: int, train_s: float, factor: float = 1.0) -> Ints:
        """[j, i]: the least period, in ns, of an instance that has strata j .. i-1. O(strata ** 2).

        An entry is 0 where j = i, and NEVER where j > i or where the cache cannot hold one of the
        requests.

        Args:
            ahead: How many batches may begin while an older one runs; at least 1.
            train_s: Length of the training step, in seconds.
            factor: Learned factor of the instance's speed.
        """
        n, most = self._n, self._most
        found = np.full((n + 1, n + 1), NEVER, np.int64)
        np.fill_diagonal(found, 0)
        if not most:
            return found
        upper = np.triu(np.ones((most + 1, most + 1), bool), 1)
        ns = np.minimum(self._periods(ahead + 1, train_s, factor)[upper] * SECOND, NEVER)
        found[:most + 1, :most + 1][upper] = np.rint(ns).astype(np.int64)
        return found

    def _periods(self, within: int, train_s: float, factor: float) -> Any:
        """The least periods in seconds, by bisection; entries below the diagonal mean nothing."""
        wait = self._beside * factor + train_s
        least = np.maximum(np.maximum(self._packed, self._longest / within), 1e-9)
        step = factor * (self._cost.common_s(self._degree) + self._cost.fixed_s(self._degree))
        most = np.maximum(least, (wait / step + self._longest) / within)
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            late = self._period(middle, factor) * (within - self._longest / middle) < wait
            least, most = np.where(late, middle, least), np.where(late, most, middle)
        return self._period(most, factor)

    def _period(self, steps: Any, factor: float) -> Any:
        """Seconds of a period with this many decode steps."""
        cost, degree = self._cost, self._degree
        experts = steps * cost.experts_s(degree, self._tokens / steps)
        return factor * (self._read + cost.decode_s(degree, steps, self._tokens, self._areas,
                                                    experts))
