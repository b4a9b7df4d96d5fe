"""Pure. The planner's inputs: a model, hardware, a training job, bounds of the search, and
requests.

The module holds values only. Counts (tokens, bytes, GPUs, ns) are whole numbers, rates are per
second, and fractions lie between 0 and 1. Bounds are checked where a person writes them
(`config/planner`), not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NEVER = 1 << 60  # the time, in ns, of a plan or a part of one that cannot run at all
SECOND = 10**9


@dataclass(frozen=True)
class ModelShape:
    """A decoder of `layers` equal layers, dense (`experts` is 0) or a mixture of experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the gated MLP that every token passes; often 0 in a mixture
    vocab: int
    tied: bool = False  # input and output embedding are one matrix
    experts: int = 0  # experts in each layer
    top_k: int = 0  # experts that a token passes
    expert_ffn: int = 0
    value_bytes: int = 2  # bytes of a weight, an activation or a cached key

    @cached_property
    def dense_params(self) -> int:
        """Weights of a layer that every token passes."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.ffn + self.hidden * (2 + self.experts)

    @cached_property
    def expert_params(self) -> int:
        """Weights of one expert of one layer."""
        return 3 * self.hidden * self.expert_ffn

    @cached_property
    def head_params(self) -> int:
        """Weights of one embedding."""
        return self.vocab * self.hidden

    @cached_property
    def params(self) -> int:
        """How many weights the model has, those of inactive experts included."""
        layer = self.dense_params + self.experts * self.expert_params
        return self.layers * layer + self.head_params * (1 if self.tied else 2)

    @cached_property
    def active_params(self) -> int:
        """Weights that a token is multiplied with; the input embedding is only looked up."""
        return self.layers * (self.dense_params + self.top_k * self.expert_params) + (
            self.head_params)

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the cached keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    def fits(self, degree: int) -> bool:
        """Whether `degree` GPUs can share its heads and its width.

        Key heads may be copied, as engines do.
        """
        wide = (self.ffn or self.expert_ffn) % degree == 0
        keys = self.kv_heads % degree == 0 or degree % self.kv_heads == 0
        return self.heads % degree == 0 and keys and wide


@dataclass(frozen=True)
class Hardware:
    """Nodes of one kind. Rates are of one GPU, in bytes or operations per second."""

    name: str
    gpus_per_node: int
    mem_bytes: int
    flops: float
    mem_bw: float
    link_bw: float  # between GPUs of one node
    net_bw: float  # one GPU's share of the network
    link_latency_s: float = 4e-6  # one hop of a collective inside a node
    net_latency_s: float = 15e-6
    mfu_train: float = 0.45
    mfu_prefill: float = 0.55
    mem_share: float = 0.85  # fraction of mem_bw that decoding reaches
    comm_share: float = 0.80  # fraction of link_bw and net_bw that collectives reach
    overlap: float = 0.80  # fraction of a backward pass during which gradients may travel
    rho: float = 0.15  # sending gradients slows that part by rho * use ** theta
    theta: float = 1.0
    step_s: float = 2e-3  # constant part of a decode step: scheduler and kernel launches
    workspace_bytes: int = 4 << 30  # memory of a GPU that holds no weights, states or keys
    sequence_s: float = 0.0  # part of a decode step per sequence: scheduling, sampling
    update_s: float = 0.0  # constant part of an optimizer step


@dataclass(frozen=True)
class Training:
    """One training step: `batch` sequences in `steps` optimizer steps of equal size."""

    batch: int
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    degrees: tuple[int, ...] = (1, 2, 4, 8)  # degrees of tensor parallelism
    zero: int = 1  # ZeRO stage: 1 divides optimizer states, 2 gradients too, 3 weights too
    recompute: bool = True  # whether the backward pass computes activations again
    forward_passes: int = 1  # extra forward passes, such as the old policy's log-probabilities
    grad_bytes: int = 4
    optimizer_bytes: int = 12
    logit_chunk: int = 4096  # tokens whose logits are in memory at once
    steps: int = 1  # optimizer steps, each with its own pipeline, gradients and update


@dataclass(frozen=True)
class Rollout:
    """The limits of a rollout engine."""

    degrees: tuple[int, ...] = (1, 2, 4, 8)
    max_batch: int = 256  # sequences that decode at once
    kv_loss: float = 0.04  # fraction of the cache that fragmentation wastes


@dataclass(frozen=True)
class Search:
    """Bounds of the search: which layouts are pruned, and which splits are examined."""

    tp_share: float = 0.50  # layouts with more TP communication over compute are pruned
    bubble: float = 0.30  # layouts whose pipeline idles for a larger share are pruned
    granularity: int = 1  # training gets a multiple of this many GPUs
    min_train: int = 1
    min_rollout: int = 1
    strata: int = 0  # groups of requests that are assigned whole; 0: see `groups_for`
    dealt: bool = False  # only equal instances, each with requests of all lengths
    loss: float = 0.0  # relative loss of cuts by length, as the router only estimates lengths
    ahead: int = 0  # batches that may roll out while an older one does; 0: none


@dataclass(frozen=True, order=True)
class Request:
    """One trajectory, with the tokens that it reads (tools' returns too) and generates."""

    prompt: int
    generated: int
    tool_ns: int = 0  # time of all its tools together
    turns: int = 1  # requests to the engine: the first one, and one after each tool

    @property
    def total(self) -> int:
        """Its length at the end, in tokens."""
        return self.prompt + self.generated


@dataclass(frozen=True, order=True)
class Layout:
    """A training layout on tp * pp * dp GPUs; `ep` divides dp."""

    tp: int
    ep: int
    pp: int
    dp: int
    micro: int  # sequences of a micro-batch

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.tp * self.pp * self.dp


PARTS = ("compute", "tp", "ep", "pp", "bubble", "dp", "contention", "update")


@dataclass(frozen=True)
class Price:
    """What a layout costs: the time of a step, and the memory of its fullest GPU.

    Attributes:
        ns: The time of a step.
        mem_bytes: The memory that its fullest GPU needs.
        parts: The time in parts, in ns, in the order of `PARTS`; empty where they are not known.
    """

    ns: int
    mem_bytes: int
    parts: tuple[int, ...] = ()

    def named(self) -> dict[str, int]:
        """The parts by name."""
        return dict(zip(PARTS, self.parts, strict=False))


class Prices:
    """Prices of layouts, in order.

    A whole `Price` is made only when it is asked for, as most layouts are only compared.

    Attributes:
        ns, mem_bytes: See `Price`; one entry for each layout.
    """

    def __init__(self, ns: Sequence[int], mem_bytes: Sequence[int], parts: Any = None) -> None:
        self.ns, self.mem_bytes, self._parts = ns, mem_bytes, parts

    def __len__(self) -> int:
        return len(self.ns)

    def __getitem__(self, k: int) -> Price:
        parts = () if self._parts is None else tuple(self._parts[k].tolist())
        return Price(self.ns[k], self.mem_bytes[k], parts)


@dataclass(frozen=True)
class Factors:
    """Measured time over modelled time, as learned; 1 where nothing is known.

    Attributes:
        train: The factor of training.
        rollout: Pairs of rollout degree and factor, by degree.
    """

    train: float = 1.0
    rollout: tuple[tuple[int, float], ...] = ()

    def of(self, degree: int) -> float:
        """The factor of rollout instances of this degree.

        A degree that was never measured gets the factor of the nearest measured degree; if two are
        equally near, that of the smaller one, so that an unknown degree does not look better.
        """
        if not self.rollout:
            return 1.0
        return min(self.rollout, key=lambda one: (max(one[0], degree) / min(one[0], degree),
                                                  one[0]))[1]
