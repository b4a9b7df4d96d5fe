"""Makes words that others chose safe to print on a terminal or in a table.

Names of actions, sessions and services, reasons and errors may contain what model-written code has
said. Control characters could change the terminal, hide a line or look like another row, and marks
that turn the direction of writing could make a name look like another one. Each such character is
shown as its escape, such as `\\x1b`. The output of a user's own command (`tangram run`) is passed
on as it is, as srun does.
"""

from __future__ import annotations

from typing import Any


def printable(text: str, lines: bool = False) -> str:
    """Returns the text with all characters escaped that are not printable.

    Args:
        text: what to print.
        lines: whether line breaks stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def printable_answer(value: Any) -> Any:
    """Returns a broker's answer, with all texts in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_answer(k): printable_answer(v) for k, v in value.items()}
    if isinstance(value, list):
        return [printable_answer(v) for v in value]
    return value
