"""Lets at most one broker hold a job's folder, and lets a broker that lost the folder notice it.

Problem: two brokers that serve one job would give one idempotency key two results. A second broker
may be started by hand, by a requeue while the first still runs on a node that is cut off, or on a
file system whose locks do not reach other nodes.

Two means are combined, because each covers cases that the other does not. A lock (`FileLock`)
refuses a second broker on the same host exactly while the first lives. An epoch (`FolderLock`) lets
a broker that was stopped and continued, or was cut off, find that it was superseded; it then
answers nothing more.

A holder that is stopped between its check and its write, and is continued after the next one has
read the journals, writes one more group of events, or its access file. Nobody uses these
(`journal_segments.py`, `access.py`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidInput

CHECK_NS = 20_000_000
YIELD_S = 0.1
HEARTBEAT_S = 2.0  # seconds between two signs of life of a holder
SILENT_S = 5 * HEARTBEAT_S  # a holder on another host that is silent for so long is dead
_PREFIX = "epoch-"
_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass(frozen=True)
class FolderOwner:
    """A broker that took a folder.

    Attributes:
        host: The host on which it runs.
        pid: Its process id.
        since: When it took the folder, local time.
        restarts: Which start of its Slurm job it belongs to (SLURM_RESTART_COUNT); -1 without
            Slurm.
    """

    host: str
    pid: int
    since: str
    restarts: int = -1

    def show(self) -> str:
        """Returns one line that tells a person who it is."""
        return f"host {self.host}, pid {self.pid}, since {self.since}"


class FileLock:
    """The lock of a job's folder: `flock` on the file `lock`.

    The kernel drops the lock when this process dies, in whatever way. A file system that has no
    locks, or whose locks other nodes do not see, is not an error.

    Attributes:
        held: Whether we have the lock. True as well where the file system has no locks.

    Raises:
        InvalidInput: The file `lock` cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.held, self._fd = True, -1
        try:
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(f"job folder {folder}: cannot make the file `lock` in it "
                               f"({error.strerror})") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # other errors mean that the file system has no locks; then the epoch decides
            self.held = error.errno not in _HELD_ERRNOS

    def release(self) -> None:
        """Releases the lock, so that another broker can take it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FolderLock:
    """A folder that this broker holds; the constructor makes its epoch. O(epochs in the folder),
    which is 1.

    An epoch is the file `epoch-N` with the holder's host, pid and a random word, made by an atomic
    create. A broker that takes the folder makes the next epoch and removes the earlier ones. It
    checks that its own epoch is there before it commits and before it answers, at most every
    `CHECK_NS`. The new holder waits for `YIELD_S`, which is longer, before it reads the old
    journals.

    Args:
        folder: The job's folder.
        file_lock: The lock of this folder.
        restarts: Which start of the Slurm job this is; -1 without Slurm.

    Attributes:
        folder: The job's folder.
        file_lock: The lock of this folder.
        restarts: Which start of the Slurm job this broker belongs to; -1 without Slurm.
        epoch: The number of this broker's epoch, from 1.
        earlier: Whether another broker had the folder before.
        earlier_restarts: Which start of the Slurm job that broker belonged to; -1 without Slurm, or
            if that is not known.
        earlier_sign_ns: When it last showed that it lived, in ns since the epoch by the file
            system's clock; 0 if there was none.

    Raises:
        InvalidInput: The folder cannot be written.
    """

    def __init__(self, folder: Path, file_lock: FileLock, restarts: int = -1) -> None:
        self.folder, self.file_lock, self.restarts = folder, file_lock, restarts
        self._lost, self._checked_at = False, 0
        me = FolderOwner(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S"),
                         restarts)
        self._content = json.dumps({**vars(me), "word": secrets.token_hex(8)}).encode()
        before = _epochs(folder)
        self.earlier, holder = bool(before), holder_of(folder)
        self.earlier_restarts = holder.restarts if holder is not None else -1
        self.earlier_sign_ns = last_sign(folder)
        number = before[-1] + 1 if before else 1
        try:
            while not self._make(number):
                number += 1  # another broker was quicker, and is superseded
            for old in _epochs(folder):
                if old < number:
                    _path(folder, old).unlink(missing_ok=True)
        except OSError as error:
            raise InvalidInput(f"job folder {folder}: cannot write there ({error.strerror})"
                               ) from None
        self.epoch = number
        self._path = os.fspath(_path(folder, number))

    def superseded(self, now: bool = False) -> bool:
        """Returns whether another broker has taken the folder, or the folder is gone.

        The file is examined at most every `CHECK_NS`, or at once with `now`. Once true, the answer
        stays true.
        """
        # this clock also runs while the machine is suspended
        at = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if self._lost or (at - self._checked_at < CHECK_NS and not now):
            return self._lost
        # the answer stays as it is if the file cannot be examined (no free file descriptor)
        with suppress(OSError):
            self._lost = _read(self._path) != self._content
        self._checked_at = at
        return self._lost

    def heartbeat(self) -> None:
        """Writes a sign of life, for brokers that cannot see this process."""
        if not self.superseded(now=True):
            with suppress(OSError):
                os.utime(self._path)

    def successor(self) -> str:
        """Returns one line that tells a person who holds the folder now."""
        found = holder_of(self.folder)
        return found.show() if found is not None else "its folder was moved or removed"

    def _make(self, number: int) -> bool:
        """Makes the epoch's file; returns whether this epoch is ours."""
        try:
            fd = os.open(_path(self.folder, number),
                         os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(fd, self._content)
            os.fsync(fd)  # other nodes must be able to read who holds the folder
        finally:
            os.close(fd)
        return True


def holder_of(folder: Path) -> FolderOwner | None:
    """Returns the broker that took a folder last; None if none did or its file cannot be read."""
    found = _epochs(folder)
    if not found:
        return None
    try:
        fields = json.loads(_read(_path(folder, found[-1])))
        return FolderOwner(str(fields["host"]), int(fields["pid"]), str(fields["since"]),
                           int(fields["restarts"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def epoch_is_gone(folder: Path, epoch: int) -> bool:
    """Returns whether another broker has taken a folder from the one that made this epoch.

    False for a folder that is no job's folder, and where the epoch's file cannot be examined.
    """
    try:
        return not _read(_path(folder, epoch)) and (folder / "lock").exists()
    except OSError:
        return False


def last_sign(folder: Path) -> int:
    """Returns when the holder of a folder last showed that it lives, ns by the file system's clock.
    """
    found = _epochs(folder)
    try:
        return os.stat(_path(folder, found[-1])).st_mtime_ns if found else 0
    except FileNotFoundError:
        return 0


def _epochs(folder: Path) -> list[int]:
    """Returns the numbers of a folder's epochs, oldest first."""
    return sorted(int(path.name[len(_PREFIX):]) for path in folder.glob(f"{_PREFIX}*")
                  if path.name[len(_PREFIX):].isdecimal())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{_PREFIX}{number}"


def _read(path: Path | str) -> bytes:
    """Returns a file's content; empty if the file is gone.

    The file is opened, because only that asks the server of a shared file system; `stat` may use a
    cached answer.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return b""
        raise
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
