"""Makes a placer from its name, such as `elastic` or `fcfs:4`. Pure."""

from __future__ import annotations

from .base import Placer
from .elastic import ElasticPlacer
from .fcfs import Fcfs
from .paper import Paper
from .placer_name import parse_placer_name
from .static import Static

_NO_LIMIT = 1 << 30


def make_placer(name: str) -> Placer:
    """Returns the placer of that name.

    Raises:
        InvalidInput: no placer has the name, or its K or TAIL is out of bounds.
    """
    kind, k = parse_placer_name(name)
    if kind == "elastic":
        return ElasticPlacer(k)
    if kind == "paper":
        return Paper()
    if kind == "first-fit":
        return Fcfs(_NO_LIMIT, strict=False)
    return Fcfs(k) if kind == "fcfs" else Static(k)
