"""The names of the placers, such as `elastic` or `fcfs:4`, and what they say. Pure.

It is apart from `placer_registry` so that whoever only checks a name loads no placer.
"""

from __future__ import annotations

from ....errors import InvalidInput

NAMES = ("elastic", "paper", "first-fit", "fcfs:K", "static:K")
TAIL, TAIL_MAX = 0, 8  # of `elastic`: the default, and the most (`cpu_division.weight`)
ESTIMATING = ("elastic", "paper")  # the kinds that decide by expected run times
_WITHOUT_K = ("paper", "first-fit")


def parse_placer_name(name: str) -> tuple[str, int]:
    """Returns a placer's kind, which is its name without K, and its K.

    K is 0 for a kind that has none; `static` without a number means `static:1`. For `elastic` it is
    the TAIL: from 0, for the least mean completion time, to TAIL_MAX, for a short tail.

    Raises:
        InvalidInput: no placer has the name, or its K or TAIL is out of bounds.
    """
    kind, colon, argument = name.partition(":")
    if kind in _WITHOUT_K and not colon:
        return kind, 0
    if name in ("elastic", "static"):
        return kind, TAIL if name == "elastic" else 1
    if kind == "elastic":
        if not argument.isdecimal() or len(argument) > 1 or int(argument) > TAIL_MAX:
            raise InvalidInput(f"placer {name!r}: write elastic:TAIL with TAIL a whole number from "
                               f"0, for the least mean, to {TAIL_MAX}, for a short tail; elastic "
                               f"alone means elastic:{TAIL}")
        return kind, int(argument)
    if kind in ("fcfs", "static"):
        if not argument.isdecimal() or len(argument) > 9 or int(argument) < 1:
            raise InvalidInput(f"placer {name!r}: write {kind}:K with K a whole number of at "
                               f"least 1, such as {kind}:4")
        return kind, int(argument)
    raise InvalidInput(f"placer {name!r} is not known; choose one of {', '.join(NAMES)}")
