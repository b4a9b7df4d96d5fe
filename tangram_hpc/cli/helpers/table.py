"""Tables of rows that a broker answered, with columns that `-o` chooses as in `tangram acct`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .printable import printable


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        name: how `-o` names it; the heading is the same in capitals.
        width: its width; below 0 it is aligned left, and None stands for as long as the text is.
            The last column of a line is never cut.
        text: returns its value in a row.
        about: what it shows.
        before: the text between the column before and this one; None for a blank.
    """

    name: str
    width: int | None
    text: Callable[[dict[str, Any]], str]
    about: str
    before: str | None = None


def choose(text: str, known: Sequence[Column]) -> list[Column]:
    """Returns the columns of a format such as `ActionID,Name%-20,State`, or `ActionID:12,State` as
    squeue's `-O` takes it.

    Raises:
        InvalidInput: a column is not known, or a width is not a number.
    """
    from ...errors import InvalidInput

    by_name, chosen = {column.name.lower(): column for column in known}, []
    for part in text.split(","):
        name, _, width = part.strip().partition(":" if "%" not in part else "%")
        column = by_name.get(name.lower())
        if column is None:
            raise InvalidInput(f"--format: {name!r} is not a column; choose from "
                               f"{', '.join(c.name for c in known)}")
        try:
            chosen.append(column._replace(width=int(width) if width else column.width))
        except ValueError:
            raise InvalidInput(f"--format: {part!r}: the width is not a number") from None
    return chosen


def lines(columns: Sequence[Column], rows: Iterable[dict[str, Any]], header: bool = True
          ) -> list[str]:
    """Returns the lines of a table. A text that was cut ends with `+`, as in `tangram acct`."""
    found = [_line(columns, [c.name.upper() for c in columns])] if header else []
    return found + [_line(columns, [c.text(row) for c in columns]) for row in rows]


def _line(columns: Sequence[Column], texts: list[str]) -> str:
    cells = [fit(text, c.width) for c, text in zip(columns[:-1], texts[:-1], strict=True)]
    last = columns[-1]
    cells.append(printable(texts[-1]).rjust(max(0, last.width or 0)))
    between = [" " if c.before is None else c.before for c in columns]
    between[0] = columns[0].before or ""
    return "".join(map(str.__add__, between, cells))


def fit(text: str, width: int | None) -> str:
    """Fits a text into a column: right aligned, left aligned for a negative width, and as it is
    for None."""
    text = printable(text)
    if width is None:
        return text
    size = abs(width)
    if len(text) > size:
        text = text[: max(0, size - 1)] + "+"
    return text.ljust(size) if width < 0 else text.rjust(size)
