"""Parses the time limit of an action: in seconds, or in Slurm's format.

Slurm's own `-t 30` means 30 minutes. Here a number alone has always been seconds, since most
actions take seconds, so it stays so; every form with a `:` or a `-` is read as srun reads it.
"""

from __future__ import annotations

import argparse
import re

_SECONDS = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)


def time_limit(text: str) -> float:
    """Returns a time limit in seconds. It is used as `type=` of an argument.

    Args:
        text: seconds, or one of `MIN:SEC`, `H:MIN:SEC`, `DAYS-H`, `DAYS-H:MIN`, `DAYS-H:MIN:SEC`.
    """
    if _SECONDS.fullmatch(text):
        return float(text)
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    counts = len(parts) in ((1, 2, 3) if dash else (2, 3))
    if not counts or not all(part.isascii() and part.isdecimal() for part in (
            *parts, *([days] if dash else []))):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time limit; write seconds (90), MIN:SEC (1:30), H:MIN:SEC, DAYS-H, "
            "DAYS-H:MIN or DAYS-H:MIN:SEC")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    hours, minutes, seconds = (0, *numbers)[-3:]
    return hours * 3600 + minutes * 60 + seconds
