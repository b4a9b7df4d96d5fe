"""What a ledger holds, field by field, for comparing two of them."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

# attributes that only remember what was computed from others, by planning for instance
CACHES = frozenset({"_memo", "_nothing_fits"})


def facts(value: Any, within: tuple[int, ...] = ()) -> Any:
    """What a value holds, in its order, without caches; a value inside itself is not looked into
    again.
    """
    if value is None or isinstance(value, int | str | bytes | float | Enum):
        return value
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if isinstance(value, dict):
        return [(facts(k, within), facts(v, within)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque | set):
        return [facts(v, within) for v in value]
    names = [*getattr(value, "__dict__", ()),
             *(n for c in type(value).__mro__ for n in getattr(c, "__slots__", ()))]
    names += getattr(value, "__struct_fields__", ())
    return type(value).__name__, [(n, facts(getattr(value, n), within)) for n in names
                                  if n not in CACHES and hasattr(value, n)]


def difference(one: Any, other: Any, path: str = "ledger") -> str:
    """Where the facts of two values differ first; empty if nowhere."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for n, (left, right) in enumerate(zip(one, other, strict=True)):
            named = isinstance(left, tuple) and left and isinstance(left[0], str | int)
            if found := difference(left, right, f"{path}.{left[0] if named else n}"):
                return found
        return ""
    return "" if one == other else f"{path}: {one!r:.300} is not {other!r:.300}"
