"""Pure. Owns: GRPO's group-relative advantages, whole and as sums that ranks can add up. Must not
communicate: an allreduce between `partial` and `advantages_from_sums` is the caller's.

The standard deviation is the population's (divided by n). A group without spread teaches nothing:
all its advantages are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput

EPS = 1e-6
_FLAT = 1e-12  # a variance below this share of the mean square is rounding, not spread

Floats = NDArray[np.float64]


def group_advantages(rewards: ArrayLike, eps: float = EPS) -> Floats:
    """(r - mean) / (std + eps) within each row of `rewards[group, member]`; same shape.

    Raises `InvalidInput` unless `rewards` has two dimensions and only finite numbers.
    """
    table = _finite(rewards)
    if table.ndim != 2:
        raise InvalidInput(f"rewards must be [group, member], not of {table.ndim} dimensions")
    if table.size == 0:
        return np.zeros_like(table)
    mean = table.mean(axis=1, keepdims=True)
    variance = ((table - mean) ** 2).mean(axis=1, keepdims=True)
    square = (table**2).mean(axis=1, keepdims=True)
    return _normalised(table - mean, variance, square, eps)


def partial(groups_index: ArrayLike, rewards: ArrayLike, n_groups: int) -> Floats:
    """One rank's sums: row g is (n, sum, sum of squares) of its rewards that belong to group g.

    `groups_index[i]` is the group (0 <= g < n_groups) of `rewards[i]`. Rows of ranks add up.
    Raises `InvalidInput` for indices out of range or arrays of different lengths.
    """
    index, values = _indexed(groups_index, rewards, n_groups)
    columns = (np.ones_like(values), values, values**2)
    sums = [np.bincount(index, weights=column, minlength=n_groups) for column in columns]
    return np.stack(sums, axis=1).astype(np.float64)


def advantages_from_sums(
    groups_index: ArrayLike, rewards: ArrayLike, sums: ArrayLike, eps: float = EPS
) -> Floats:
    """The advantages of one rank's `rewards`, by the added-up `partial` rows of all ranks.

    Raises `InvalidInput` as `partial` does, or when a needed group is empty in `sums`.
    """
    table = _finite(sums)
    if table.ndim != 2 or table.shape[1] != 3:
        raise InvalidInput(f"sums must be [group, 3], not {table.shape}")
    index, values = _indexed(groups_index, rewards, len(table))
    count, total, squares = table[index].T
    if (count < 1).any():
        raise InvalidInput("sums hold no member of a group that rewards belong to")
    mean, square = total / count, squares / count
    return _normalised(values - mean, square - mean**2, square, eps)


def _normalised(centred: Floats, variance: Floats, square: Floats, eps: float) -> Floats:
    spread = variance > _FLAT * square
    std = np.sqrt(np.where(spread, variance, 1.0))
    return np.where(spread, centred / (std + eps), 0.0)


def _finite(values: ArrayLike) -> Floats:
    table = np.asarray(values, dtype=np.float64)
    if not np.isfinite(table).all():
        raise InvalidInput("rewards and their sums must be finite numbers")
    return table


def _indexed(
    groups_index: ArrayLike, rewards: ArrayLike, n_groups: int
) -> tuple[NDArray[np.int64], Floats]:
    index = np.asarray(groups_index, dtype=np.int64)
    values = _finite(rewards)
    if index.ndim != 1 or index.shape != values.shape:
        raise InvalidInput(f"one group index per reward: {index.shape} against {values.shape}")
    if index.size and not (index.min() >= 0 and index.max() < n_groups):
        raise InvalidInput(f"group indices must be from 0 to {n_groups - 1}")
    return index, values
