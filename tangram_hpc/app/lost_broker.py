"""Ends a trainer's rank that has lost its broker with one line.

When a broker is gone for good, the calls of all ranks that wait for it raise the same error. A
trainer that does not catch it would print a traceback of some thirty lines on each rank, which
hides the reason. Every other error keeps its traceback, and so does the use of a closed client. A
hook that was there before, such as that of a crash reporter, is still called.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from ..errors import BrokerUnreachable, ClientClosed, TangramError
from ..ports import ChannelLost
from ..transport.mpi.mpi_launch import launch_rank

_installed = False  # whether this process, or the one that it was forked from, has the hook


def report_loss_in_one_line(environ: Mapping[str, str]) -> None:
    """Wraps `sys.excepthook`, once for each process.

    The exit status stays that of an uncaught exception, which is 1.

    Args:
        environ: this process's environment, whose `RANK`, or number among the launched tasks, is
            the rank that the line names.
    """
    global _installed
    if _installed:
        return
    _installed, before = True, sys.excepthook
    who = f"rank {environ.get('RANK') or launch_rank(environ)}: "

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (not isinstance(error, BrokerUnreachable) or isinstance(error, ClientClosed)
                or _hides_another(error)):
            before(kind, error, trace)
            return
        # in one piece, as the ranks of a job step write into the same file
        sys.stderr.write(f"tangram: error: {who}{error}\n")
        if before is not sys.__excepthook__:  # somebody else's, who may report the crash
            before(kind, error.with_traceback(None), None)

    sys.excepthook = hook


def _hides_another(error: BaseException) -> bool:
    """Whether the trainer's own error was being handled, as where a `finally` uses the broker."""
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return earlier is not None and (
        not isinstance(earlier, TangramError | ChannelLost | OSError) or _hides_another(earlier))
