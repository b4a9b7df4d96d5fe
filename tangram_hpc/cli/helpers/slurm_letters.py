"""Formats as squeue and sinfo take them after `-o`: letters such as in `%.18i %.8j %t`.

People have such formats in scripts and environments. Each letter stands for one of our columns. The
text between two letters is not kept: columns are separated by one blank, as in our other tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .table import Column

_LETTER = re.compile(r"%(\.?)(\d*)([A-Za-z])")


def is_in_letters(text: str) -> bool:
    """Returns whether a format is written in letters. In one with names, `%` follows a name."""
    return text.lstrip().startswith("%")


def columns_of(text: str, letters: Mapping[str, str], known: Sequence[Column]) -> list[Column]:
    """Returns the columns of a format such as `%.18i %.8j %t`: `.` aligns right, the number is the
    width, and without a number the column has its usual width and side.

    Args:
        text: the format.
        letters: for each letter, the name of the column that it stands for.
        known: all columns.

    Raises:
        InvalidInput: a letter is not known.
    """
    from ...errors import InvalidInput

    by_name, chosen = {column.name: column for column in known}, []
    for right, width, letter in _LETTER.findall(text):
        if letter not in letters:
            raise InvalidInput(f"--format: %{letter} is none of the letters that are known here: "
                               f"{', '.join(f'%{each} {name}' for each, name in letters.items())}")
        column = by_name[letters[letter]]
        if width:
            column = column._replace(width=int(width) if right else -int(width))
        chosen.append(column)
    if not chosen:
        raise InvalidInput(f"--format: {text!r} names no column; write %i %j %t, or names with "
                           "commas")
    return chosen
