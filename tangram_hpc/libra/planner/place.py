"""Pure. Assigns GPUs of nodes to each part of a split.

Parts are placed one behind the other, the largest first. As sizes are powers of two that divide a
node, each part begins at a multiple of its size, so none spans two nodes and there is always room.

Invariants: no GPU is given twice, and GPUs that share layers lie in one node.
"""

from __future__ import annotations

from typing import NamedTuple

from .split import Split


class GpuSpan(NamedTuple):
    """Neighbouring GPUs of one node.

    Attributes:
        role: `train` or `rollout`.
        part: Index of the training group or of the rollout instance.
        node: Number of the node.
        gpus: Their numbers on the node.
    """

    role: str
    part: int
    node: int
    gpus: tuple[int, ...]


def place(split: Split, gpus_per_node: int) -> list[GpuSpan]:
    """The blocks of all training groups, then those of all instances. O(groups x log groups)."""
    layout = split.layout
    wanted = [(layout.tp, "train", k) for k in range(layout.pp * layout.dp)]
    wanted += [(one.degree, "rollout", k) for k, one in enumerate(split.instances)]
    blocks, at = [], 0
    for size, role, part in sorted(wanted, key=lambda w: (-w[0], w[1] == "rollout", w[2])):
        node, first = divmod(at, gpus_per_node)
        blocks.append(GpuSpan(role, part, node, tuple(range(first, first + size))))
        at += size
    return sorted(blocks, key=lambda b: (b.role == "rollout", b.part))
