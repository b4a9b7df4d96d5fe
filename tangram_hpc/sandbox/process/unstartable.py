"""The error of a command that could not be started."""

from __future__ import annotations


class Unstartable(Exception):
    """The command could not be started.

    Attributes:
        code: the exit code that a shell would give.
        reason: one line that says why.
        full: whether there was no room for one more process.
    """

    def __init__(self, code: int, reason: str, full: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.full = full
