"""Groups class names of actions that differ only in numbers. Pure."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"[0-9]+")


def template(name: str) -> str:
    """Returns the name with each number replaced by `N`: `run_17.py` becomes `run_N.py`. Linear."""
    return _DIGITS.sub("N", name)
