"""Input for a running command: signals, and bytes and sizes for its terminal. Pure.

It travels from the client through broker and worker to the init of the command's sandbox, and is
not journaled, since no decision depends on it. Bytes need credit: the init grants `WINDOW` bytes
when the command has begun, and as many again as its terminal has taken. The broker counts the
credit too, and refuses what exceeds it. So a client that writes faster than its command reads is
held back at its own side, and what waits on the way to one command is at most `WINDOW`.

A broken connection of the client loses neither input (`unconfirmed.py`) nor credit: the broker says
how much it has granted in all, and repeats that on a new connection.
"""

from __future__ import annotations

DATA, HANGUP, SIGNAL, RESIZE = range(4)  # the kinds of input
WINDOW = 64 * 1024  # bytes on their way to one command
PIECE_MAX = 16 * 1024  # bytes of one message
SIDE_MAX = 4096  # rows or columns of a terminal
DETACH = 12  # USR2: sends a detachable command to the background
DETACHED = "it goes on in the background"  # the reason of an action that ended so
SIGNALS = (1, 2, 3, 10, 12, 15, 18, 20)  # HUP INT QUIT USR1 USR2 TERM CONT TSTP


def wrong_size(size: tuple[int, int]) -> str:
    """Returns what is wrong with the rows and columns of a terminal; empty if nothing is."""
    if all(0 < side <= SIDE_MAX for side in size):
        return ""
    return f"rows, cols: {size[0]}, {size[1]} are not from 1 to {SIDE_MAX}"


class InputWindow:
    """The credit of several commands or streams: how many bytes may still be sent to each of them.

    Args:
        window: the most credit of one command or stream, in bytes.
        piece_max: the most bytes of one message.
    """

    def __init__(self, window: int = WINDOW, piece_max: int = PIECE_MAX) -> None:
        self._window, self._piece_max = window, piece_max
        self._left: dict[int, int] = {}
        self._granted: dict[int, int] = {}

    def grant(self, number: int, count: int) -> int:
        """Adds credit for a command, to at most the window; returns how much was added."""
        left = self._left.get(number, 0)
        added = max(0, min(count, self._window - left))
        self._left[number] = left + added
        self._granted[number] = self._granted.get(number, 0) + added
        return added

    def restore(self, number: int, granted: int, received: int) -> None:
        """Sets the credit of a command to what its worker says, after a restart of the broker.

        Args:
            number: the command.
            granted: how many bytes the worker has allowed in all.
            received: how many bytes it has received in all.
        """
        self._granted[number] = granted
        self._left[number] = max(0, min(granted - received, self._window))

    def take(self, number: int, count: int) -> bool:
        """Takes credit for `count` bytes; returns False, and takes nothing, if there is less."""
        left = self._left.get(number, 0)
        if count > min(left, self._piece_max):
            return False
        self._left[number] = left - count
        return True

    def left(self, number: int) -> int:
        """Returns how many bytes may be sent to a command now."""
        return self._left.get(number, 0)

    def granted(self) -> dict[int, int]:
        """Returns how many bytes each command has been granted in all."""
        return self._granted

    def forget(self, number: int) -> None:
        """Forgets a command that has ended."""
        if self._left.pop(number, None) is not None:  # most commands never had credit
            self._granted.pop(number, None)
