"""GRPO's group-relative advantages, of a whole table or from sums that ranks can add up.

This module computes only. Ranks that share groups call `partial`, add the results by an allreduce
and pass them to `advantages_from_sums`. The standard deviation is the population's (divided by n).
A group whose rewards are all equal teaches nothing, so all its advantages are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput

EPS = 1e-6
_FLAT = 1e-12  # a variance below this fraction of the mean square is rounding error

Floats = NDArray[np.float64]


def group_advantages(rewards: ArrayLike, eps: float = EPS) -> Floats:
    """Returns (r - mean) / (std + eps) within each row of `rewards[group, member]`, in the same
    shape.

    Raises:
        InvalidInput: `rewards` has not two dimensions, or holds a number that is not finite.
    """
    table = _finite(rewards)
    if table.ndim != 2:
        raise InvalidInput(f"rewards must be an array [group, member], got {table.ndim} dimensions")
    if table.size == 0:
        return np.zeros_like(table)
    mean = table.mean(axis=1, keepdims=True)
    variance = ((table - mean) ** 2).mean(axis=1, keepdims=True)
    square = (table**2).mean(axis=1, keepdims=True)
    return _normalised(table - mean, variance, square, eps)


def partial(groups_index: ArrayLike, rewards: ArrayLike, n_groups: int) -> Floats:
    """Returns one rank's sums: row g is (n, sum, sum of squares) of its rewards of group g.

    The rows of several ranks can be added.

    Args:
        groups_index: The group of each reward, from 0 to `n_groups - 1`.
        rewards: This rank's rewards.
        n_groups: Number of groups of all ranks.

    Raises:
        InvalidInput: An index is out of range, or the arrays differ in length.
    """
    index, values = _indexed(groups_index, rewards, n_groups)
    columns = (np.ones_like(values), values, values**2)
    sums = [np.bincount(index, weights=column, minlength=n_groups) for column in columns]
    return np.stack(sums, axis=1).astype(np.float64)


def advantages_from_sums(
    groups_index: ArrayLike, rewards: ArrayLike, sums: ArrayLike, eps: float = EPS
) -> Floats:
    """Returns the advantages of one rank's `rewards` from the added sums of all ranks.

    Raises:
        InvalidInput: As for `partial`, or `sums` has no member of a group that a reward belongs to.
    """
    table = _finite(sums)
    if table.ndim != 2 or table.shape[1] != 3:
        raise InvalidInput(f"sums must be an array [group, 3], got shape {table.shape}")
    index, values = _indexed(groups_index, rewards, len(table))
    count, total, squares = table[index].T
    if (count < 1).any():
        raise InvalidInput("sums: a group of these rewards has no member in them")
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
        raise InvalidInput("groups_index must have one entry per reward: its shape is "
                           f"{index.shape}, and that of rewards {values.shape}")
    if index.size and not (index.min() >= 0 and index.max() < n_groups):
        raise InvalidInput(f"group indices must be from 0 to {n_groups - 1}")
    return index, values
