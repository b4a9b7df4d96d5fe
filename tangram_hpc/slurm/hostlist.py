"""Expands Slurm's hostlists: `c[1-3,7],g1` stands for c1, c2, c3, c7 and g1.

Pure. Names keep Slurm's order and their leading zeros. ClusterShell's node sets sort the names, and
importing them takes longer than this module takes to run (decision 0060).
"""

from __future__ import annotations

import re

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
NAMES_MAX = 1 << 17  # names of one list: more than any machine has nodes


def expand(text: str) -> tuple[str, ...]:
    """Returns the names of a hostlist, in its order. O(names).

    Raises:
        ValueError: the text is no hostlist, or has more than `NAMES_MAX` names.
    """
    found: list[str] = []
    for part in _parts(text):
        if part:
            found += _names(part)
        if len(found) > NAMES_MAX:
            raise ValueError(f"{text[:80]!r} has more than {NAMES_MAX} names")
    return tuple(found)


def _parts(text: str) -> list[str]:
    """Cuts a list at the commas outside of brackets."""
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
