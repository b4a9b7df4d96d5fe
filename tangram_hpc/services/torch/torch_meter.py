"""Limits the memory of a CPU slot that stands in for a GPU, by counting the bytes of its tensors.

Nothing else limits the memory of such a slot. On a real device torch's allocator keeps the limit,
so that device must not be metered here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemoryMeter(TorchDispatchMode):
    """While this context is active, counts the bytes of all tensors that exist.

    Args:
        limit: How many bytes the device has. An operation that needs more raises
            torch.OutOfMemoryError.

    Attributes:
        limit: See above.
        used: Bytes of all tensors that live.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.used = 0
        self._live: dict[int, int] = {}  # storage -> bytes

    def __torch_dispatch__(self, func: Callable[..., Any], types: Sequence[type],
                           args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
                           ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs))
                 if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in given:
                self._add(leaf.untyped_storage())
        if self.used > self.limit:
            raise torch.OutOfMemoryError(
                f"{self.used >> 20} MiB are needed, and the slot has {self.limit >> 20}")
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.used += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.used -= self._live.pop(key)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
