"""Pure. Computes how long a training step takes in a layout, and the memory of its fullest GPU.

The batch is packed without padding: sorted by length, cut into micro-batches, and dealt to the
replicas in turn. The first replica has the most work, so its time is the step's time. Its pipeline
is a flow shop of equal stages, which takes the sum of all micro-batches plus the longest one once
more for each further stage (Pinedo, Scheduling, section 6.1). Each of several optimizer steps may
have the longest micro-batch.

Invariants: a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .lengths import Ints, sorted_requests
from .shapes import NEVER, SECOND, Hardware, Layout, ModelShape, Price, Prices, Request, Training


@dataclass(frozen=True)
class TokenLoad:
    """Sums of tokens and of squared tokens over some micro-batches; one entry for each layout."""

    tokens: Any
    squares: Any
    micros: Any


class _Layouts:
    """Many layouts as columns."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        table = np.array([(x.tp, x.ep, x.pp, x.dp, x.micro) for x in layouts], np.int64)
        self.tp, self.ep, self.pp, self.dp, self.micro = table.T
        self.gpus = self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Stage:
    """Seconds of one pipeline stage for a load; one entry for each layout."""

    compute: Any
    tp: Any
    ep: Any
    pp: Any

    @property
    def total(self) -> Any:
        """The sum of all parts, because nothing in a stage overlaps."""
        return self.compute + self.tp + self.ep + self.pp


class TrainCost:
    """Training steps of one model on one kind of hardware with one batch."""

    def __init__(self, model: ModelShape, hardware: Hardware, training: Training,
                 batch: Sequence[Request]) -> None:
        self.model, self.hardware, self.training = model, hardware, training
        self._lengths = np.array([r.total for r in sorted_requests(batch)][::-1], np.int64)
        self._dealt: dict[tuple[int, int], tuple[int, int, int, int, int]] = {}
        self.mean_tokens = int(self._lengths.mean())
        self.passes = 3 + training.recompute + training.forward_passes  # forward 1, backward 2
        self._rounds = 2 * (self.passes - 1)  # all-reduces of a layer: two in each pass

    def _deal(self, dp: int, micro: int) -> tuple[int, int, int, int, int]:
        """Returns sums over the first replica, and over its first (longest) micro-batch.

        O(batch) the first time. `dp * micro` must divide the batch.

        Returns:
            Tokens, squares and number of micro-batches of the replica; tokens and squares of the
                micro-batch.
        """
        found = self._dealt.get((dp, micro))
        if found is None:
            sums = self._lengths.reshape(-1, micro).sum(axis=1)
            squares = (self._lengths ** 2).reshape(-1, micro).sum(axis=1)
            found = (int(sums[::dp].sum()), int(squares[::dp].sum()), len(sums) // dp,
                     int(sums[0]), int(squares[0]))
            self._dealt[dp, micro] = found
        return found

    def _loads(self, of: _Layouts) -> tuple[TokenLoad, TokenLoad]:
        """Returns the load of the slowest replica, and the load of its longest micro-batch."""
        pairs = zip(of.dp.tolist(), of.micro.tolist(), strict=True)
        tokens, squares, micros, top_tokens, top_squares = np.array(
            [self._deal(dp, micro) for dp, micro in pairs], np.int64).T
        return TokenLoad(tokens, squares, micros), TokenLoad(top_tokens, top_squares, 1)

    def tp_share(self, tp: int) -> float:
        """Communication of tensor parallelism over compute, at the batch's mean length."""
        one = self._stage(_Layouts([Layout(tp, 1, 1, 1, 1)]),
                          TokenLoad(self.mean_tokens, self.mean_tokens ** 2, 0))
        return float(one.tp[0] / one.compute[0])

    def price(self, layout: Layout, factor: float = 1.0) -> Price:
        """The price of a step in this layout; memory is counted in full even if it does not fit."""
        return self.prices([layout], factor)[0]

    def prices(self, layouts: Sequence[Layout], factor: float = 1.0) -> Prices:
        """The price of each layout. O(layouts), in numpy."""
        if not layouts:
            return Prices((), ())
        of = _Layouts(layouts)
        load, top = self._loads(of)
        all_of_it, longest = self._stage(of, load), self._stage(of, top)
        head = 2.0 * self.passes * self.model.head_params * load.tokens / self._rate(of)
        exposed, slowed = self._gradients(of, 2 / self.passes * longest.compute)
        # in the order of PARTS
        steps = self.training.steps
        seconds = (all_of_it.compute + head, all_of_it.tp, all_of_it.ep, all_of_it.pp,
                   steps * (of.pp - 1) * longest.total, steps * exposed, steps * slowed,
                   steps * self._update(of))
        parts = np.rint(np.minimum(np.array(seconds).T * factor * SECOND, NEVER)).astype(np.int64)
        total = np.minimum(parts.sum(axis=1), NEVER).tolist()
        memory = self._mem_bytes(of, load, top).tolist()
        return Prices(total, memory, parts)

    def _mem_bytes(self, of: _Layouts, load: TokenLoad, top: TokenLoad) -> Ints:
        """Weights, gradients, optimizer states, activations and logits of the fullest GPU."""
        t, m = self.training, self.model
        held = np.zeros(len(of.tp), np.int64)
        for params, replicas in self._held(of):
            for size, divided in ((m.value_bytes, 3), (t.grad_bytes, 2), (t.optimizer_bytes, 1)):
                held += -(-params * size // (replicas if t.zero >= divided else 1))
        tokens = top.tokens.astype(float)  # exact up to any real memory size, without overflow
        flying = tokens * np.minimum(of.pp, load.micros // t.steps)
        width = 6 * m.hidden + 2 * (m.heads + m.kv_heads) * m.head_dim + 3 * (
            m.ffn + m.top_k * m.expert_ffn)  # values that a layer keeps for each token
        layers = m.layers // of.pp
        if t.recompute:
            kept = flying * m.hidden * layers + tokens * width
        else:
            kept = flying * width * layers
        logits = np.minimum(tokens, t.logit_chunk) * m.vocab * (4 + m.value_bytes)
        buffers = np.minimum((kept * m.value_bytes + logits) // of.tp, NEVER).astype(np.int64)
        return np.asarray(held + buffers + self.hardware.workspace_bytes)

    def _held(self, of: _Layouts) -> tuple[tuple[Ints, Ints], ...]:
        """(weights on one GPU, replicas of them), for the weights that every token passes and for
        the experts.
        """
        m, layers = self.model, self.model.layers // of.pp
        ends = m.head_params * np.where(of.pp == 1, 1 if m.tied else 2, 1)
        dense = -(-(layers * m.dense_params + ends) // of.tp)
        experts = -(-layers * m.experts * m.expert_params // (of.tp * of.ep))
        return (dense, of.dp), (experts, of.dp // of.ep)

    def _rate(self, of: _Layouts) -> Any:
        """Operations per second of the GPUs that share a layer."""
        return of.tp * (self.hardware.flops * self.hardware.mfu_train)

    def _wire(self, gpus: Ints) -> tuple[Any, Any]:
        """Bytes per second, and seconds per hop, among `gpus` neighbouring GPUs."""
        h, near = self.hardware, gpus <= self.hardware.gpus_per_node
        return (np.where(near, h.link_bw, h.net_bw) * h.comm_share,
                np.where(near, h.link_latency_s, h.net_latency_s))

    def _stage(self, of: _Layouts, load: TokenLoad) -> Stage:
        """The work of one stage, without the output head."""
        m, tp, ep = self.model, of.tp, of.ep
        layers = m.layers // of.pp
        active = m.dense_params + m.top_k * m.expert_params
        attention = float(m.heads * m.head_dim)  # a float, as squares of lengths may be large
        once = layers * 2.0 * (float(active) * load.tokens + attention * load.squares)
        values = load.tokens * float(m.hidden * m.value_bytes)
        link, hop = self._wire(tp)
        ring = 2 * (tp - 1) * (values / tp / link + load.micros * hop)
        wide, far = self._wire(tp * ep)
        spread = (ep - 1) * (values * m.top_k / tp / ep / wide + load.micros * far)
        across, away = self._wire(of.gpus)
        passed = np.where(of.pp > 1, 2 * (values / tp / across + load.micros * away), 0.0)
        return Stage(self.passes * once / self._rate(of), self._rounds * layers * ring,
                     self._rounds * layers * spread, passed)

    def _gradients(self, of: _Layouts, backward: Any) -> tuple[Any, Any]:
        """Seconds in which only gradients are sent, and seconds by which sending them slows the
        backward pass.
        """
        rounds = 3 if self.training.zero >= 3 else 2
        wire, hop = self._wire(of.gpus)
        comm = np.zeros(len(of.tp))
        for params, replicas in self._held(of):
            comm += rounds * (replicas - 1) * (
                params * self.training.grad_bytes / replicas / wire + np.where(params, hop, 0))
        under = self.hardware.overlap * backward
        use = np.minimum(1.0, comm / np.maximum(under, 1e-30))
        slowed = np.where(comm > 0, under * self.hardware.rho * use ** self.hardware.theta, 0.0)
        return np.maximum(0.0, comm - under), slowed

    def _update(self, of: _Layouts) -> Any:
        """Seconds in which an optimizer reads and writes its states, plus a constant."""
        t = self.training
        size = self.model.value_bytes + t.grad_bytes + t.optimizer_bytes
        total = sum(params / (replicas if t.zero >= 1 else 1)
                    for params, replicas in self._held(of))
        h = self.hardware
        return 2 * total * size / (h.mem_bw * h.mem_share) + h.update_s
