"""Pure. What period a rollout instance keeps up with where batches mix: trajectories of the next
ones begin while the longest of the ones before still run.

Law: a function of its arguments; more requests, and a longer training step, never take less time.
Each period one batch's requests come to the instance, and one batch must be whole: its last
trajectory ends within `ahead + 1` periods less the training step, as the batch that is `ahead`
later begins when it has been trained. In a period of P seconds the instance makes as many decode
steps S as fit into it; so a step takes P / S, a request of g tokens takes g P / S and the time of
its prompt and tools, and about tokens / S of them run at once, which cache and engine must hold.
Fewer steps share the weights' reading among more sequences, more steps end a request sooner: the
least period is that of the fewest steps with which all are in time, the most tokens and the longest
prompt and tools taken as one request's (the mean of a processor-sharing queue; Kleinrock, Queueing
Systems II, section 4.4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .lengths import Ints, Strata
from .rollout_cost import RolloutCost, spans, tops
from .shapes import NEVER, SECOND

_HALVINGS = 44  # of the steps between which the answer lies: to a nanosecond of a day


class FlowCost:
    """Instances of one degree for one batch in strata."""

    def __init__(self, cost: RolloutCost, degree: int, strata: Strata) -> None:
        """O(strata ** 2)."""
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
        """[j, i]: the least period of an instance for strata j .. i-1, ns; 0 for none of them,
        NEVER where the cache is too small for one of them and for j > i. `ahead` is at least 1,
        `factor` what was learned of the instance's speed. O(strata ** 2)."""
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
        """In seconds; what lies under the diagonal is junk."""
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
        """Seconds of a period of so many steps."""
        cost, degree = self._cost, self._degree
        experts = steps * cost.experts_s(degree, self._tokens / steps)
        return factor * (self._read + cost.decode_s(degree, steps, self._tokens, self._areas,
                                                    experts))
