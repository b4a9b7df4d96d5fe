"""Connects this process's terminal with that of an action, for `tangram run --pty`.

While they are connected this terminal is raw: every key goes to the action, and its programs decide
what ^C and ^D mean. Where stdin is a pipe or a file, its content is the input, and its end ends the
input.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PIECE = 1 << 14


def size() -> tuple[int, int]:
    """The rows and columns of this terminal; 24 and 80 where there is none."""
    columns, rows = shutil.get_terminal_size((80, 24))
    return max(1, min(rows, 4096)), max(1, min(columns, 4096))


def connect(pty: Any) -> None:
    """Copies input and output until the action has ended and its output is written."""
    with _raw(), _resizes(pty):
        threading.Thread(target=_copy_input, args=(pty,), daemon=True).start()
        for piece in pty:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()


def _copy_input(pty: Any) -> None:
    from ...errors import TangramError

    with suppress(OSError, TangramError):  # the action has ended, or nobody is at stdin
        while data := os.read(0, _PIECE):
            pty.write(data)
        pty.hang_up()


@contextmanager
def _raw() -> Iterator[None]:
    """Makes this terminal raw for a while, if stdin is one."""
    import termios
    import tty

    try:
        before = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        tty.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _resizes(pty: Any) -> Iterator[None]:
    """Passes on each change of this terminal's size."""
    before = signal.signal(signal.SIGWINCH, lambda *_: pty.resize(*size()))
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
