"""Answers that break off after their headers went out, and how the log tells it.

HTTP has one way to say so then: the connection is closed before the body's end, and the client sees
that the body is incomplete. uvicorn does that for a request whose application raises, and writes a
traceback. These ends are expected, so each is one line of the log instead.
"""

from __future__ import annotations

import asyncio
import logging

_LOGGER = "uvicorn.error"


class CutOff(Exception):
    """An answer that has begun cannot be completed. No handler may be registered for it.

    Args:
        message: one line for the log: what was answered, and why it broke off.
    """


class _OneLine(logging.Filter):
    """Writes one line instead of a traceback for a CutOff, and for a request that was cancelled
    because the server ends."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CutOff):
            text = f"an answer was cut off: {error}"
        elif isinstance(error, asyncio.CancelledError):
            text = "an answer was cut off: the server ends"
        else:
            return True
        record.msg, record.args, record.exc_info = text, (), None
        return True


def tell_cut_offs_in_one_line() -> None:
    """Makes uvicorn's log tell cut off answers in one line each."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(each, _OneLine) for each in logger.filters):
        logger.addFilter(_OneLine())
