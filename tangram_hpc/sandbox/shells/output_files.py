"""The files of commands that can go to the background: output, input and exit code.

Pipes would end with the action of a command, so a detachable command writes its output to two
files, `PATH.out` and `PATH.err`. Its input, if clients send any, is the FIFO `PATH.in`. The exit
code of a command that went to the background is written to `PATH.code`. All of them lie in one
folder of the sandbox's directory for temporary files, where code of the sandbox can spoil them: it
then spoils its own output only, since the init opens them as a program of the sandbox would.

Processes that a command has left running may still write to its files. So the names are never used
again, and the files stay, emptied, for `KEPT` further commands: what is written to them
counts for the sandbox's limit of disk space. Who reads the files of a command that went to the
background removes them.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections import deque
from contextlib import suppress

from ..files import confine
from ..process.unstartable import Unstartable
from ..process.users import Identity

FOLDER = ".detachable"  # in the directory for temporary files
KEPT = 32
_OUTPUT = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OutputFiles:
    """The open files of one command.

    Attributes:
        path: the beginning of their paths in the sandbox.
        out: the descriptors of the two output files; they are read and written.
        stdin: what the command reads; -1 for nothing.
        passed: for each output file, the bytes that were read of it.
        _hold: keeps the FIFO open, so that the command does not see its end; -1 without one.
        _code: the descriptor of the file for the exit code; -1 before the command is detached.
    """

    def __init__(self, path: str, out: tuple[int, int], stdin: int = -1, hold: int = -1) -> None:
        self.path, self.out, self.stdin = path, out, stdin
        self.passed = [0, 0]
        self._hold, self._code = hold, -1

    def unread(self, stream: int) -> int:
        """Returns how many bytes an output file has now that were not read."""
        return os.fstat(self.out[stream]).st_size - self.passed[stream]

    def read(self, stream: int, most: int) -> bytes:
        """Reads on in an output file."""
        data = os.pread(self.out[stream], most, self.passed[stream])
        self.passed[stream] += len(data)
        return data

    def close_stdin(self) -> None:
        """Closes what the command reads, after it was started."""
        self.stdin = _closed(self.stdin)

    def close_input(self) -> None:
        """Ends the command's input."""
        self._hold = _closed(self._hold)

    def detach(self, home: str) -> None:
        """Prepares the file for the exit code, as the command goes to the background."""
        with suppress(confine.PathRefused, OSError):
            folder = confine.folder(home, os.path.dirname(self.path))
            try:
                self._code = os.open(f"{os.path.basename(self.path)}.code", _OUTPUT, 0o600,
                                     dir_fd=folder)
            finally:
                os.close(folder)

    def ended(self, code: int) -> None:
        """Writes the exit code of a command that is detached, and closes everything."""
        if self._code >= 0:
            with suppress(OSError):  # the disk is full
                os.write(self._code, b"%d\n" % code)
        self.close()

    def close(self, empty: bool = False) -> None:
        """Closes everything.

        Args:
            empty: whether the output files are emptied before.
        """
        for fd in self.out:
            if empty and fd >= 0 and os.fstat(fd).st_size:
                with suppress(OSError):
                    os.truncate(fd, 0)
        self.close_output()
        self.close_stdin()
        self.close_input()
        self._code = _closed(self._code)

    def close_output(self) -> None:
        """Closes the output files, as nothing of them will be read here any more."""
        for fd in self.out:
            _closed(fd)
        self.out = (-1, -1)


def _closed(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


class OutputFolder:
    """Makes the files of the commands of one sandbox.

    Args:
        home: the session's directory.
        tmp: the directory for temporary files.
    """

    def __init__(self, home: str, tmp: str) -> None:
        self._home, self._path = home, os.path.join(home, tmp, FOLDER)
        # begins at the time, so that another init of this sandbox takes other names
        self._numbers = itertools.count(time.time_ns())
        self._ended: deque[str] = deque()  # names of ended commands

    def create(self, reads_input: bool, identity: Identity | None) -> OutputFiles:
        """Makes and opens the files of a command.

        Args:
            reads_input: whether it reads what clients send.
            identity: the user as which it runs; None for that of this process.

        Raises:
            Unstartable: they cannot be made.
        """
        name = str(next(self._numbers))
        opened: list[int] = []
        try:
            folder = confine.folder(self._home, self._path)
            opened.append(folder)
            self._remove_old(folder)
            for end in ("out", "err"):
                opened.append(os.open(f"{name}.{end}", _OUTPUT, 0o600, dir_fd=folder))
            if reads_input:
                _open_fifo(f"{name}.in", folder, opened)
            if identity is not None:
                os.chmod(".", 0o711, dir_fd=folder)  # its user opens files below
                for fd in opened[1:]:
                    os.fchown(fd, identity.uid, identity.gid)
        except (confine.PathRefused, OSError) as error:
            for fd in opened:
                os.close(fd)
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise Unstartable(126, f"{self._path}: the files for the command's output cannot be "
                                   f"made ({why})") from None
        os.close(folder)
        out, err, *fifo = opened[1:]
        hold, stdin = fifo or (-1, -1)
        return OutputFiles(f"{self._path}/{name}", (out, err), stdin, hold)

    def retire(self, files: OutputFiles) -> None:
        """Empties and closes the files of a command that has ended, and removes them later."""
        files.close(empty=True)
        self._ended.append(os.path.basename(files.path))

    def _remove_old(self, folder: int) -> None:
        while len(self._ended) > KEPT:
            name = self._ended.popleft()
            for end in ("out", "err", "in"):
                with suppress(OSError):  # code of the sandbox has spoiled it
                    os.unlink(f"{name}.{end}", dir_fd=folder)


def _open_fifo(name: str, folder: int, opened: list[int]) -> None:
    """Makes a FIFO; opens it for reading and writing, and for the command's reading."""
    os.mkfifo(name, 0o600, dir_fd=folder)
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for way in (os.O_RDWR, os.O_RDONLY):
        opened.append(os.open(name, way | flags, dir_fd=folder))
        if not stat.S_ISFIFO(os.fstat(opened[-1]).st_mode):
            raise OSError(errno.EINVAL, "not a FIFO any more")
        os.set_blocking(opened[-1], True)
