"""Makes a placer from its name, such as `elastic` or `fcfs:4`. Pure.

`static` without a number means `static:1`.
"""

from __future__ import annotations

from ....errors import InvalidInput
from .base import Placer
from .elastic import ElasticPlacer
from .fcfs import Fcfs
from .paper import Paper
from .static import Static

NAMES = ("elastic", "paper", "first-fit", "fcfs:K", "static:K")
_NO_LIMIT = 1 << 30


def make_placer(name: str) -> Placer:
    """Returns the placer of that name.

    Raises:
        InvalidInput: no placer has the name, or its K is not a whole number of at least 1.
    """
    kind, _, argument = name.partition(":")
    if kind == "first-fit" and not argument:
        return Fcfs(_NO_LIMIT, strict=False)
    if name == "elastic":
        return ElasticPlacer()
    if name == "paper":
        return Paper()
    if name == "static":
        return Static(1)
    if kind in ("fcfs", "static"):
        if not argument.isdigit() or int(argument) < 1:
            raise InvalidInput(f"placer {name!r}: write {kind}:K with K a whole number of at "
                               f"least 1, such as {kind}:4")
        return Fcfs(int(argument)) if kind == "fcfs" else Static(int(argument))
    raise InvalidInput(f"placer {name!r} is not known; choose one of {', '.join(NAMES)}")
