"""Pure. Names of classes of actions: which of them are variants of one template."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"[0-9]+")


def template(name: str) -> str:
    """A name with each number as `N`, so that names that differ in numbers only are one:
    `run_17.py` is `run_N.py`. Linear in the name."""
    return _DIGITS.sub("N", name)
