"""Pure. What a training step takes in a layout, and what its fullest GPU must hold.

Law: a function of its arguments. The batch is packed without padding: sorted by length, cut into
micro-batches, dealt to the replicas in turn; the first replica has the most work and is the one
that is timed. Its pipeline is a flow shop of alike stages, which takes the sum of all micro-batches
and the longest once more for each further stage (Pinedo, Scheduling, section 6.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .lengths import sorted_requests
from .shapes import NEVER, SECOND, Hardware, Layout, ModelShape, Price, Request, Training


class Load(NamedTuple):
    """Tokens and squares of tokens: of the slowest replica, and of its longest micro-batch."""

    tokens: int
    squares: int
    top_tokens: int
    top_squares: int
    micros: int


class Stage(NamedTuple):
    """Seconds of one pipeline stage for some tokens."""

    compute: float
    tp: float
    ep: float
    pp: float

    def __call__(self) -> float:
        return self.compute + self.tp + self.ep + self.pp


class TrainCost:
    """Training steps of one model on one kind of hardware with one batch."""

    def __init__(self, model: ModelShape, hardware: Hardware, training: Training,
                 batch: Sequence[Request]) -> None:
        self.model, self.hardware, self.training = model, hardware, training
        self._lengths = np.array([r.total for r in sorted_requests(batch)][::-1], np.int64)
        self._loads: dict[tuple[int, int], Load] = {}
        self.mean_tokens = int(self._lengths.mean())
        self.passes = 3 + training.recompute + training.forward_passes  # a backward one is two
        self._rounds = 2 * (self.passes - 1)  # collectives of a layer: two a pass

    def load(self, dp: int, micro: int) -> Load:
        """How a batch is dealt; `dp * micro` divides it. O(batch) the first time."""
        found = self._loads.get((dp, micro))
        if found is None:
            sums = self._lengths.reshape(-1, micro).sum(axis=1)
            squares = (self._lengths ** 2).reshape(-1, micro).sum(axis=1)
            found = Load(int(sums[::dp].sum()), int(squares[::dp].sum()), int(sums[0]),
                         int(squares[0]), len(sums) // dp)
            self._loads[dp, micro] = found
        return found

    def tp_share(self, tp: int) -> float:
        """Communication of tensor parallelism over compute, at the batch's mean length."""
        one = self._stage(Layout(tp, 1, 1, 1, 1), self.mean_tokens, self.mean_tokens ** 2, 0)
        return one.tp / one.compute

    def price(self, layout: Layout, factor: float = 1.0) -> Price:
        """A step in this layout. Memory is counted in full even where it does not fit."""
        load = self.load(layout.dp, layout.micro)
        all_of_it = self._stage(layout, load.tokens, load.squares, load.micros)
        top = self._stage(layout, load.top_tokens, load.top_squares, 1)
        head = 2 * self.passes * self.model.head_params * load.tokens / self._rate(layout)
        fill = (layout.pp - 1) * top()
        backward = 2 / self.passes * top.compute
        exposed, slowed = self._gradients(layout, backward)
        update = self._update(layout)
        parts = {"compute": all_of_it.compute + head, "tp": all_of_it.tp, "ep": all_of_it.ep,
                 "pp": all_of_it.pp, "bubble": fill, "dp": exposed, "contention": slowed,
                 "update": update}
        told = tuple((name, min(NEVER, round(s * factor * SECOND))) for name, s in parts.items())
        return Price(min(NEVER, sum(ns for _, ns in told)), self.mem_bytes(layout), told)

    def mem_bytes(self, layout: Layout) -> int:
        """Weights, gradients, optimizer, activations and logits of the fullest GPU."""
        t, m = self.training, self.model
        load = self.load(layout.dp, layout.micro)
        held = 0
        for params, replicas in self._held(layout):
            for size, divided in ((m.value_bytes, 3), (t.grad_bytes, 2), (t.optimizer_bytes, 1)):
                held += -(-params * size // (replicas if t.zero >= divided else 1))
        flying = load.top_tokens * min(layout.pp, load.micros)
        width = 6 * m.hidden + 2 * (m.heads + m.kv_heads) * m.head_dim + 3 * (
            m.ffn + m.top_k * m.expert_ffn)  # values of a token kept by a layer
        layers = m.layers // layout.pp
        if t.recompute:
            kept = flying * m.hidden * layers + load.top_tokens * width
        else:
            kept = flying * width * layers
        logits = min(load.top_tokens, t.logit_chunk) * m.vocab * (4 + m.value_bytes)
        return (held + (kept * m.value_bytes + logits) // layout.tp
                + self.hardware.workspace_bytes)

    def _held(self, layout: Layout) -> tuple[tuple[int, int], ...]:
        """(weights of a GPU, replicas of them): what all pass, and its experts."""
        m, layers = self.model, self.model.layers // layout.pp
        ends = m.head_params * (2 if layout.pp == 1 and not m.tied else 1)
        dense = -(-(layers * m.dense_params + ends) // layout.tp)
        experts = -(-layers * m.experts * m.expert_params // (layout.tp * layout.ep))
        return (dense, layout.dp), (experts, layout.dp // layout.ep)

    def _rate(self, layout: Layout) -> float:
        """Operations a second of the GPUs that share a layer."""
        return layout.tp * self.hardware.flops * self.hardware.mfu_train

    def _wire(self, gpus: int) -> tuple[float, float]:
        """Bytes a second, and seconds a hop, among so many neighbouring GPUs."""
        h = self.hardware
        if gpus <= h.gpus_per_node:
            return h.link_bw * h.comm_share, h.link_latency_s
        return h.net_bw * h.comm_share, h.net_latency_s

    def _stage(self, layout: Layout, tokens: int, squares: int, micros: int) -> Stage:
        """One stage's work for so many tokens in `micros` micro-batches, without the head."""
        m, tp, ep = self.model, layout.tp, layout.ep
        layers = m.layers // layout.pp
        active = m.dense_params + m.top_k * m.expert_params
        once = layers * 2 * (active * tokens + m.heads * m.head_dim * squares)
        values = tokens * m.hidden * m.value_bytes
        link, hop = self._wire(tp)
        ring = 2 * (tp - 1) * (values / tp / link + micros * hop)
        wide, far = self._wire(tp * ep)
        spread = (ep - 1) * (values * m.top_k / tp / ep / wide + micros * far)
        across, away = self._wire(layout.gpus)
        passed = 2 * (values / tp / across + micros * away) if layout.pp > 1 else 0.0
        return Stage(self.passes * once / self._rate(layout), self._rounds * layers * ring,
                     self._rounds * layers * spread, passed)

    def _gradients(self, layout: Layout, backward: float) -> tuple[float, float]:
        """Seconds that gradients travel alone, and by which they slow the pass beside them."""
        rounds = 3 if self.training.zero >= 3 else 2
        comm = 0.0
        for params, replicas in self._held(layout):
            if replicas > 1:
                wire, hop = self._wire(layout.gpus)
                comm += rounds * (replicas - 1) * (
                    params * self.training.grad_bytes / replicas / wire + hop)
        under = self.hardware.overlap * backward
        use = min(1.0, comm / under) if under else 0.0
        slowed = under * self.hardware.rho * use ** self.hardware.theta if comm else 0.0
        return max(0.0, comm - under), slowed

    def _update(self, layout: Layout) -> float:
        """The optimizer reads and writes all that it holds."""
        t = self.training
        size = self.model.value_bytes + t.grad_bytes + t.optimizer_bytes
        total = sum(params / (replicas if t.zero >= 1 else 1)
                    for params, replicas in self._held(layout))
        return 2 * total * size / (self.hardware.mem_bw * self.hardware.mem_share)
