"""Says on stderr how far long work is: a bar on a terminal, a plain line now and then elsewhere.

A bar is removed when the work is over, and the first line comes after 10 s, so that the output of
short work stays as it is.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR = 30
_EVERY_S = 0.2  # between two changes of a bar
_LINE_S = 10.0  # before the first line, and between two lines


class ProgressBar:
    """The progress of one piece of work; used as a context manager, whose end removes the bar.

    Args:
        what: the work and its unit, such as `sim: trajectories`.
        total: how many units there are; 0 if that is not known.
        stream: where to print; stderr by default.
        clock: gives the time in s.
    """

    def __init__(self, what: str, total: int = 0, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._clock = what, total, clock
        self._stream = stream if stream is not None else sys.stderr
        self._bar = self._stream.isatty()
        self._began = clock()
        self._next = self._began + (0 if self._bar else _LINE_S)
        self._note = ""
        self._width = 0  # of the bar that is on the terminal

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._stream.write(f"\r{'':{self._width}}\r")
            self._stream.flush()

    def at(self, done: int, note: str = "") -> None:
        """Says that so many units are done, if it is time to say so.

        Args:
            done: how many units are done.
            note: what is under way, if people should know; a bar shows a new one at once.
        """
        now = self._clock()
        if now < self._next and not (self._bar and note != self._note):
            return
        self._note = note
        self._next = now + (_EVERY_S if self._bar else _LINE_S)
        text = self._text(done, now - self._began) + (f", {note}" if note else "")
        if not self._bar:
            print(f"tangram: {text}", file=self._stream, flush=True)
            return
        text = text[:shutil.get_terminal_size().columns - 1]  # \r removes one line only
        self._stream.write(f"\r{text:{self._width}}")
        self._stream.flush()
        self._width = max(self._width, len(text))

    def _text(self, done: int, took_s: float) -> str:
        if not self._total:
            return f"{self._what}: {done}, {took_s:.0f} s"
        share = min(1.0, done / self._total)
        bar = f" [{'#' * round(share * _BAR):<{_BAR}}]" if self._bar else ""
        left = f", about {took_s / share - took_s:.0f} s left" if share else ""
        return f"{self._what}{bar} {done}/{self._total}, {took_s:.0f} s{left}"
