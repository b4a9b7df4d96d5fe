"""Pure. Computes how long a rollout instance of a given degree takes for given requests.

Decoding is bound by memory reads: each step reads the weights once, and each token reads the keys
of its sequence. So the time of the keys is a plain sum, and the time of the weights is that of
`steps`, which is the largest of three numbers: the longest request, the batch's key-steps over the
cache, and its tokens over the engine's batch. In a mixture of experts each step reads the experts
that its sequences pass. They are counted in two ways, as if all requests began at once and as if
all steps had equally many sequences; the larger number is taken.

The model follows Libra's, which takes mean lengths and no longest request; see docs/LIBRA.md.

Invariants: a function of its arguments; more requests never take less time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .lengths import Ints, Strata
from .shapes import NEVER, SECOND, Hardware, ModelShape, Rollout

_LEAST = 5e-324  # the smallest number with a logarithm, for models whose tokens pass all experts
PIECES = 64  # intervals of time in which the sequences of a mixture are counted


class RolloutCost:
    """Instances of one model on one kind of hardware."""

    def __init__(self, model: ModelShape, hardware: Hardware, rollout: Rollout) -> None:
        self.model, self.hardware, self.rollout = model, hardware, rollout
        self._read: tuple[Strata, Any] | None = None  # the last answer of `_together`

    def cut(self, degree: int) -> str:
        """Why an instance of this degree cannot exist; "" if it can."""
        if not self.model.fits(degree):
            return "TP does not divide the model's heads or width"
        if self.hardware.gpus_per_node % degree:
            return f"TP does not divide a node of {self.hardware.gpus_per_node} GPUs"
        return ""

    def kv_tokens(self, degree: int) -> int:
        """For how many tokens an instance holds keys; 0 if its weights do not fit or if it is
        `cut`.
        """
        if self.cut(degree):
            return 0
        weights = self.model.params * self.model.value_bytes
        free = degree * (self.hardware.mem_bytes - self.hardware.workspace_bytes) - weights
        copies = max(1, degree // self.model.kv_heads)  # copies of each key head
        return max(0, int(free / (self.model.kv_bytes * copies) * (1 - self.rollout.kv_loss)))

    def common_s(self, degree: int) -> float:
        """Seconds to read once the weights that every token passes."""
        m = self.model
        values = m.layers * m.dense_params + m.head_params
        return values * m.value_bytes / (degree * self.hardware.mem_bw * self.hardware.mem_share)

    def experts_s(self, degree: int, sequences: Any) -> Any:
        """Seconds to read once the experts that any of `sequences` tokens passes.

        Each token is assumed to draw its experts uniformly.
        """
        m, h = self.model, self.hardware
        if not m.experts:
            return 0.0 * sequences
        read = -np.expm1(sequences * math.log(max(1 - m.top_k / m.experts, _LEAST)))
        values = m.layers * m.experts * m.expert_params * m.value_bytes
        return values * read / (degree * h.mem_bw * h.mem_share)

    def fixed_s(self, degree: int) -> float:
        """The constant seconds of a decode step, whatever its size: the engine's own time, and the
        hops of two all-reduces in each layer.
        """
        hops = 2 * math.log2(degree) * self.hardware.link_latency_s
        return self.hardware.step_s + 2 * self.model.layers * hops

    def key_step_s(self, degree: int) -> float:
        """Seconds to read one token's keys once."""
        copies = max(1, degree // self.model.kv_heads)
        h = self.hardware
        return self.model.kv_bytes * copies / (degree * h.mem_bw * h.mem_share)

    def flops_s(self, degree: int) -> float:
        """Seconds to multiply one token with the weights."""
        h = self.hardware
        return 2 * self.model.active_params / (degree * h.flops * h.mfu_prefill)

    def sums_s(self, degree: int) -> float:
        """Seconds to send one token's data for two all-reduces in each layer between the GPUs."""
        m, h = self.model, self.hardware
        ring = 2 * (degree - 1) / degree * m.hidden * m.value_bytes / (h.link_bw * h.comm_share)
        return 2 * m.layers * ring

    def prefill_s(self, degree: int, tokens: Any, squares: Any) -> Any:
        """Seconds to read prompts with this sum of tokens and this sum of squared tokens."""
        m, h = self.model, self.hardware
        attention = 2 * m.layers * m.heads * m.head_dim / (degree * h.flops * h.mfu_prefill)
        return tokens * (self.flops_s(degree) + self.sums_s(degree)) + squares * attention

    def decode_s(self, degree: int, steps: Any, tokens: Any, key_steps: Any,
                 experts_s: Any) -> Any:
        """Seconds to write `tokens` tokens in `steps` steps.

        `key_steps` is how often a token's keys are read in all, `experts_s` the seconds in which
        experts are read in all.
        """
        reading = (steps * self.common_s(degree) + experts_s
                   + key_steps * self.key_step_s(degree))
        return (np.maximum(reading, tokens * self.flops_s(degree))
                + tokens * (self.sums_s(degree) + self.hardware.sequence_s)
                + steps * self.fixed_s(degree))

    def step_s(self, degree: int, sequences: int, keys: float) -> float:
        """Seconds of one decode step of `sequences` sequences with `keys` tokens in the cache."""
        return float(self.decode_s(degree, 1, sequences, keys, self.experts_s(degree, sequences)))

    def alone_s(self, degree: int, prompt: Any, generated: Any, tool_s: Any = 0.0) -> Any:
        """Seconds of a request alone on the instance, tools included; for numbers or arrays."""
        area = generated * (2 * prompt + generated) / 2
        experts = generated * self.experts_s(degree, 1)
        return (tool_s + self.prefill_s(degree, prompt, prompt * prompt)
                + self.decode_s(degree, generated, generated, area, experts))

    def matrix(self, degree: int, strata: Strata, factor: float = 1.0) -> Ints:
        """[j, i]: the time, in ns, of an instance that has strata j .. i-1. O(strata ** 2).

        An entry is 0 where j = i, and NEVER where j > i or where the cache cannot hold one of the
        requests.
        """
        n, room = len(strata), self.kv_tokens(degree)
        found = np.full((n + 1, n + 1), NEVER, np.int64)
        np.fill_diagonal(found, 0)
        most = int(np.searchsorted(strata.totals, room, "right"))  # longer strata do not fit
        if not room or not most:
            return found
        seconds = self._seconds(degree, strata, most, room) * factor
        upper = np.triu(np.ones((most + 1, most + 1), bool), 1)
        ns = np.minimum(seconds[upper] * SECOND, NEVER)
        found[:most + 1, :most + 1][upper] = np.rint(ns).astype(np.int64)
        return found

    def _seconds(self, degree: int, strata: Strata, most: int, room: int) -> Any:
        """[j, i] in seconds for the first `most` strata; entries below the diagonal mean nothing.
        """
        end = strata.begin(most)
        bare = self.alone_s(degree, strata.prompt[:end], strata.generated[:end])
        alone, bare = (tops(np.maximum.reduceat(one, strata.starts[:most]), most)
                       for one in (bare + strata.tool_ns[:end] / SECOND, bare))
        longest = tops(strata.longest, most)
        tokens, areas = spans(strata.tokens, most), spans(strata.areas, most) / 2
        packed = np.maximum(areas / room, tokens / self.rollout.max_batch)
        together = self._together(strata)[:most + 1, :most + 1] / degree
        experts = np.maximum(
            together, packed * self.experts_s(degree, tokens / np.maximum(packed, 1)))
        read = self._again(degree, strata, most, room) + self.prefill_s(
            degree, spans(strata.prompts, most), spans(strata.squares, most))
        crowd = read + self.decode_s(degree, np.maximum(longest, packed), tokens, areas, experts)
        # the longest request waits for its tools, too; other requests share its steps
        last = read + self.decode_s(degree, longest, tokens, areas, together) + alone - bare
        return np.maximum(np.maximum(crowd, last), alone)

    def _again(self, degree: int, strata: Strata, most: int, room: int) -> Any:
        """[j, i]: seconds in which contexts are read again that had been evicted from the cache.

        All requests are assumed to begin together and to grow at the same rate. Once they fill the
        cache, the context of each turn has been evicted. With a peak of p tokens and room for r,
        this holds for the turns after the fraction r / p of a request's time, which read 1 - (r /
        p) ** 2 of the tokens of all turns.
        """
        peaks = np.maximum(strata.peaks(self.rollout.max_batch)[:most + 1, :most + 1], room)
        share = 1 - (room / peaks) ** 2
        return self.prefill_s(degree, spans(strata.contexts, most) * share,
                              spans(strata.context_squares, most) * share)

    def _together(self, strata: Strata) -> Any:
        """[j, i]: seconds in which one GPU reads experts for strata j .. i-1, if all begin at once.

        Each request ends after its own tokens. Time is divided into intervals; in each of them the
        mean number of sequences counts. O(strata ** 2 x pieces), once for all degrees.
        """
        if self._read is None or self._read[0] is not strata:
            n = len(strata) + 1
            first, end = np.triu_indices(n, 1)
            seconds, before = np.zeros(len(first)), 0
            for edge in _edges(strata.generated) if self.model.experts else ():
                lives = np.clip(strata.generated - before, 0, edge - before)
                held = np.concatenate(([0], np.cumsum(np.add.reduceat(lives, strata.starts))))
                sequences = (held[end] - held[first]) / (edge - before)
                seconds += (edge - before) * self.experts_s(1, sequences)
                before = edge
            found = np.zeros((n, n))
            found[first, end] = seconds
            self._read = strata, found
        return self._read[1]


def spans(values: Any, most: int) -> Any:
    """Returns a matrix: at [j, i] the sum of values[j:i], of the first `most` values; else 0."""
    prefix = np.concatenate(([0], np.cumsum(values[:most])))
    return np.maximum(prefix[None, :] - prefix[:, None], 0)


def tops(values: Any, most: int) -> Any:
    """Returns a matrix: at [j, i] the largest of values[j:i], of the first `most`; else 0."""
    high = np.zeros((most + 1, most + 1))
    for j in range(most):
        high[j, j + 1:] = np.maximum.accumulate(values[j:most])
    return high


def _edges(lengths: Ints) -> list[int]:
    """The lengths at which time is divided: all distinct lengths if they are few, else `PIECES` of
    them.

    Half of these are quantiles of the distinct lengths, half are evenly spaced up to the longest.
    """
    found = np.unique(lengths)
    if len(found) > PIECES:
        shares = found[np.arange(1, PIECES // 2 + 1) * len(found) // (PIECES // 2) - 1]
        even = np.arange(1, PIECES // 2 + 1) * int(found[-1]) // (PIECES // 2)
        found = np.unique(np.concatenate((shares, np.maximum(even, 1))))
    return [int(edge) for edge in found]
