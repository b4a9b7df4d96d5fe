"""Tells a person at a terminal which verb helps next, in one line on stderr.

A program that reads a verb's output never sees it: both streams must be terminals.
"""

from __future__ import annotations

import sys


def hint(text: str) -> None:
    """Prints a hint, if a person is there to read it.

    Args:
        text: the rest of the line after "tangram: hint: ".
    """
    if sys.stdout.isatty() and sys.stderr.isatty():
        print(f"tangram: hint: {text}", file=sys.stderr)
