"""Ends a rank's process with one line if the ranks do not fit, and with its own exit status.

When the ranks do not fit together, every rank raises the same error. Without this module each of
them would print a traceback. Where MPI must not be finalised, the process ends by `os._exit`, which
needs the status that the program passed to `sys.exit`.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ...errors import TangramError

_refusals: list[TangramError] = []  # the error that all ranks raise; at most one
_noted: list[Any] = []  # the last argument of `sys.exit`; at most one


def refuse(error: TangramError) -> None:
    """Notes the error that all ranks raise because they do not fit together."""
    _refusals.append(error)


def one_line_hook(before: Any, aloud: bool) -> Any:
    """Returns an excepthook for a world whose ranks do not fit together.

    Rank 0 prints one line, and every rank ends with the error's status, instead of a traceback from
    each rank. A program can still catch the error.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TangramError) or error not in _refusals:
            before(kind, error, trace)
            return
        if aloud:
            print(f"tangram: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status)

    return hook


def note_exit_status() -> None:
    """Wraps `sys.exit` to learn this process's exit status.

    `finalize` may have to end the process by `os._exit` and needs the status for it; Python does
    not pass the status to exit handlers.
    """
    real = sys.exit

    def noting_exit(status: Any = None, /) -> None:
        _noted[:] = [status]
        real(status)

    sys.exit = noting_exit  # type: ignore[assignment]


def exit_status() -> int:
    """Returns the status with which this program means to end."""
    if hasattr(sys, "last_value"):
        return 1
    status = _noted[0] if _noted else 0
    return status if isinstance(status, int) else int(status is not None)
