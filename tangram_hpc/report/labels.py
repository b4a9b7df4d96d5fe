"""Makes names and reasons safe to stand on a page.

Names of actions, sessions and services may be what a model has written. On the page they are text
and nothing else: characters that do not print become their escapes, marks of HTML become entities,
and a long text is cut. Plotly reads entities too, and would otherwise take `<a href=...>` in a name
for a link.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

LENGTH_MAX = 48  # characters of a name


def plain(text: str, length_max: int = LENGTH_MAX) -> str:
    """Returns one line that prints, of at most so many characters, not escaped for HTML."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
                    for c in text[: length_max + 1])
    return shown if len(shown) <= length_max else shown[: length_max - 1] + "…"


def apart(texts: Iterable[str], length_max: int = LENGTH_MAX) -> list[str]:
    """Returns different texts as `plain` does, with a number at the end of each text that is equal
    to an earlier one after the cut: Plotly draws two equal categories as one.
    """
    shown = dict[str, int]()
    for text in texts:
        found, number = plain(text, length_max), 1
        while found in shown:
            number += 1
            suffix = f" ({number})"
            found = plain(text, length_max - len(suffix)) + suffix
        shown[found] = number
    return [*shown]


def plain_tail(text: str, length_max: int) -> str:
    """Returns what `plain` does, but of a long text the end."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
                    for c in text[-length_max - 1:])
    return shown if len(shown) <= length_max else "…" + shown[1 - length_max:]


def label(text: str, length_max: int = LENGTH_MAX) -> str:
    """Returns the text for HTML and for Plotly."""
    return escape(plain(text, length_max))
