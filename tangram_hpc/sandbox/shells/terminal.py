"""A terminal (pty) of a sandbox, on which one command or one shell runs.

The init keeps the controlling side. What a program writes is read there, and what a client sends is
written there, as fast as the programs read it. A sandbox that has no terminal devices is refused
one: an untrusted `process` sandbox would see the terminals of its user, so it has none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import termios
from collections import deque
from contextlib import suppress

from ...protocol import input_flow
from ..process.unstartable import Unstartable
from ..process.users import Identity

_TIOCGPTN = 0x80045430  # the number of a terminal; Python has no name for it
_LINE_ENDS = b"\n\r\x04\x03\x15\x1a\x1c"  # after these the line of a terminal is empty
_REFUSED = ("pty: this sandbox has no terminals ({}); open the session with backend='bwrap' or, "
            "for code of your own, trusted=True")
_NONE_FREE = ("pty: no terminal is free on this node; end others there, or raise the sysctl "
              "kernel.pty.max")


class Terminal:
    """One terminal. `program` is the side of its programs, until `started`.

    Attributes:
        fd: the controlling side; not blocking.
        path: the name of the other side, as the sandbox names it.
    """

    def __init__(self, size: tuple[int, int], echo: bool) -> None:
        """Opens a terminal of `size` rows and columns.

        Raises:
            Unstartable: the sandbox has no terminals, or the size is out of bounds.
        """
        if why := input_flow.wrong_size(size):
            raise Unstartable(126, why)
        try:
            self.fd, self.program = os.openpty()
        except OSError as error:
            why = (_NONE_FREE if error.errno == errno.ENOSPC else
                   _REFUSED.format(error.strerror))
            raise Unstartable(126, why) from None
        try:
            # not os.ttyname: in a pid namespace an init has no /proc/self
            number = struct.unpack("I", fcntl.ioctl(self.fd, _TIOCGPTN, bytes(4)))[0]
            self.path = f"/dev/pts/{number}"
            self.resize(*size)
            if not echo:
                modes = termios.tcgetattr(self.program)
                modes[3] &= ~(termios.ECHO | termios.ECHONL)
                termios.tcsetattr(self.program, termios.TCSANOW, modes)
        except (OSError, termios.error) as error:
            self.close()
            raise Unstartable(126, _REFUSED.format(error)) from None
        os.set_blocking(self.fd, False)
        self._unwritten = bytearray()
        self._taken = 0  # bytes that the terminal took in all
        self._ends: deque[int] = deque()  # after how many bytes in all each end of input follows
        self._in_line = False  # whether the last input byte has not ended its line

    def give(self, identity: Identity | None) -> None:
        """Makes `identity`, if given, the owner of the program's side of the terminal.

        Raises:
            Unstartable: the sandbox does not allow a change of the owner.
        """
        if identity is not None:
            try:
                os.fchown(self.program, identity.uid, -1)
            except OSError as error:
                raise Unstartable(126, _REFUSED.format(error.strerror)) from None

    def started(self) -> None:
        """Closes this process's copy of the program's side, once the program has it: while a copy
        is open here, the end of the program does not show."""
        if self.program >= 0:
            os.close(self.program)
            self.program = -1

    def resize(self, rows: int, columns: int) -> None:
        """Changes the size; the kernel sends SIGWINCH to the foreground processes."""
        if self.fd < 0:  # its command has ended
            return
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def interrupt(self, number: int, otherwise: int) -> None:
        """Sends a signal to the terminal's foreground process group, or to the process group
        `otherwise` if it has none.
        """
        try:
            group = os.tcgetpgrp(self.fd)
        except OSError:
            group = 0
        with suppress(OSError):  # it has ended
            os.killpg(group if group > 1 else otherwise, signal.Signals(number))

    def write(self, data: bytes) -> int:
        """Writes input now or when there is room; returns how many bytes the terminal took."""
        self._unwritten += data
        return self.write_more()

    def hang_up(self) -> None:
        """Ends the input behind what was written: the reader sees the end of file (^D)."""
        self._ends.append(self._taken + len(self._unwritten))
        self.write_more()

    def write_more(self) -> int:
        """Writes what waits, as far as there is room; returns how many bytes the terminal took."""
        before = self._taken
        try:
            while self.waits_to_write:
                most = self._ends[0] - self._taken if self._ends else len(self._unwritten)
                if most:
                    count = os.write(self.fd, self._unwritten[: min(most, input_flow.PIECE_MAX)])
                    self._in_line = self._unwritten[count - 1] not in _LINE_ENDS
                    del self._unwritten[:count]
                    self._taken += count
                else:  # within a line, ^D only hands the line over; the next one is then the end
                    os.write(self.fd, b"\x04\x04" if self._in_line else b"\x04")
                    self._ends.popleft()
                    self._in_line = False
        except BlockingIOError:
            pass
        except OSError:  # nobody is at the other side any more
            self._taken += len(self._unwritten)
            self._unwritten.clear()
            self._ends.clear()
        return self._taken - before

    @property
    def waits_to_write(self) -> bool:
        """Whether input waits for room."""
        return bool(self._unwritten or self._ends)

    @property
    def events(self) -> int:
        """What to wait for at `fd`."""
        return select.POLLIN | (select.POLLOUT if self.waits_to_write else 0)

    def close(self) -> None:
        """Closes both sides: programs that still run on the terminal get SIGHUP."""
        self.started()
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
            self.fd = -1

