"""What SIGTERM and SIGHUP do to a verb. One that is ignored, as under `nohup`, stays ignored."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the process as ^C does, by way of all `finally` clauses, for a
    verb that has something to put back: its terminal, a file or a folder. Call it in the main
    thread.
    """
    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    taken = [number for number in (signal.SIGTERM, signal.SIGHUP)
             if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def call_at_end(stop: Callable[[], object]) -> None:
    """Lets SIGTERM and SIGHUP call a function from now on. Call it in the main thread."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stop())
