"""Finds the here-documents that a line of a Dockerfile begins. It reads text only.

A here-document is what both Docker and the shell take for one. For Docker (Dockerfile reference,
"Here-Documents") `<<` or `<<-` begins a word, with a file descriptor's number in front or not. For
the shell (POSIX, "Here-Document") the word behind it is the delimiter, of any characters when it is
quoted, and `<<` means something else within quotes, comments, `${...}` and arithmetic.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_QUOTED = r"""\\.|'[^']*(?:'|$)|"(?:\\.|[^"\\])*(?:"|$)"""
# what the shell takes as a whole: quotes, here-strings, `${...}`, comments
_WHOLE = re.compile(rf"(?s:{_QUOTED}|<<<|\$\{{[^}}]*\}}|(?:(?<=[\s;&|()])|^)#.*)")
_BEGIN = re.compile(rf"(?:(?<=[\s;&|()])|^)\d*<<(-?)[ \t]*((?:{_QUOTED}|[^\s|&;<>()'\"\\])+)")


@dataclass(frozen=True)
class HereDocument:
    """One here-document.

    Attributes:
        start, end: where it stands in its line.
        delimiter: the line that ends it, without quotes.
        tabs: whether the tabs at the beginning of its lines do not count (`<<-`).
    """

    start: int
    end: int
    delimiter: str
    tabs: bool

    def ends_with(self, line: str) -> bool:
        """Returns whether a line ends the document."""
        return (line.lstrip("\t") if self.tabs else line) == self.delimiter


def here_documents(line: str) -> Iterator[HereDocument]:
    """Yields the here-documents of a line in their order."""
    at = 0
    while at < len(line):
        if found := _WHOLE.match(line, at):
            at = found.end()
        elif line.startswith("((", at):
            at = _end_of_arithmetic(line, at) or at + 1
        elif found := _BEGIN.match(line, at):
            with suppress(ValueError):  # a quote that does not end: the shell refuses the line
                yield HereDocument(at, found.end(), "".join(shlex.split(found[2])), bool(found[1]))
            at = found.end()
        else:
            at += 1


def _end_of_arithmetic(line: str, start: int) -> int:
    """Returns the place behind the `))` that belongs to a `((`; 0 if these are two subshells."""
    depth = 0
    for at in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if not depth:
            return at + 1 if line[at - 1] == ")" else 0
    return 0
