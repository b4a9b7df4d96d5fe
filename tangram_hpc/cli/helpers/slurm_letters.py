"""Formats as squeue and sinfo take them after `-o`: letters such as in `%.18i %.8j %t`.

People have such formats in scripts. Each letter stands for one of our columns, and the text between
two letters is printed as it is, so that `%i|%t` gives lines that `cut -d'|'` can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from . import table
from .table import Column

_LETTER = re.compile(r"%(\.?)(\d*)([A-Za-z])")


def choose(text: str, letters: Mapping[str, str], known: Sequence[Column]) -> list[Column]:
    """Returns the columns of a format with names, as `table.choose` does, or with letters.

    In a format such as `%.18i %.8j %t`, `.` aligns right, the number is the width, and without a
    number a value is as wide as its text. In a format with names, `%` only follows a name.

    Args:
        text: the format.
        letters: for each letter, the name of the column that it stands for.
        known: all columns.

    Raises:
        InvalidInput: a column or letter is not known, `%` is not followed by a letter, or a width
            is not a number.
    """
    in_letters = text.lstrip().startswith("%")
    return _by_letters(text, letters, known) if in_letters else table.choose(text, known)


def _by_letters(text: str, letters: Mapping[str, str], known: Sequence[Column]) -> list[Column]:
    from ...errors import InvalidInput

    by_name, chosen, end = {column.name: column for column in known}, [], 0
    for found in _LETTER.finditer(text):
        right, width, letter = found.groups()
        if letter not in letters:
            raise InvalidInput(f"--format: %{letter} is none of the letters that are known here: "
                               f"{', '.join(f'%{each} {name}' for each, name in letters.items())}")
        size = (int(width) if right else -int(width)) if width else None
        chosen.append(by_name[letters[letter]]._replace(width=size,
                                                        before=text[end:found.start()]))
        end = found.end()
    rest = text[end:]
    if unread := [each for each in (*(c.before or "" for c in chosen), rest) if "%" in each]:
        raise InvalidInput(f"--format: {unread[0].strip()!r} cannot be read; write %, a point if "
                           "the value is aligned right, its width and a letter, as in %.18i")
    if rest:
        chosen.append(Column("", None, lambda row: "", "", rest))
    return chosen
