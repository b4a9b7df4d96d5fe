"""Pure. Slurm's hostlists: `c[1-3,7],g1` as names."""

from __future__ import annotations

import re

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
NAMES_MAX = 1 << 17  # of one list; more than any machine has


def expand(text: str) -> tuple[str, ...]:
    """The names in a hostlist, in its order; leading zeros are kept. O(names).

    Raises:
        ValueError: it is no hostlist, or a monstrous one.
    """
    found: list[str] = []
    for part in _parts(text):
        if part:
            found += _names(part)
        if len(found) > NAMES_MAX:
            raise ValueError(f"{text[:80]!r} has more than {NAMES_MAX} names")
    return tuple(found)


def _parts(text: str) -> list[str]:
    """Cut at the commas that are in no brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text)]


def _names(part: str) -> list[str]:
    match = _BRACKETS.search(part)
    if match is None:
        if "[" in part or "]" in part:
            raise ValueError(f"{part[:80]!r} is no hostlist")
        return [part]
    tails = _names(part[match.end():]) if part[match.end():] else [""]
    heads = [part[:match.start()] + number for number in _numbers(match[1], part)]
    if len(heads) * len(tails) > NAMES_MAX:
        raise ValueError(f"{part[:80]!r} has more than {NAMES_MAX} names")
    return [head + tail for head in heads for tail in tails]


def _numbers(inside: str, part: str) -> list[str]:
    found: list[str] = []
    for piece in inside.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part[:80]!r} is no hostlist")
        low, high = int(first), int(last or first)
        if high - low > NAMES_MAX:
            raise ValueError(f"{part[:80]!r} has more than {NAMES_MAX} names")
        found += [str(n).zfill(len(first)) for n in range(low, high + 1)]
    return found
