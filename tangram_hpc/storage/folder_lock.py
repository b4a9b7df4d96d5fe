"""Who serves a job: at most one broker holds the job's folder, and one that lost it notices.

Problem: two brokers that serve one job give one `once` name two results. A second one may be
started by hand, by a requeue while the first still runs on a node that is cut off, or on a file
system whose locks do not reach other nodes.

Two means, each for what the other cannot see:

- A lock (`flock` on the file `lock`). The kernel drops it when its holder dies, however that was,
  so a second broker on the same host is refused exactly while the first lives. File systems without
  locks, and locks that another node does not see, are no reason to fail.
- An epoch: the file `epoch-N` with the holder's host, pid and a random word, made by an atomic
  create. Whoever takes the folder makes the next one and removes those before it. A broker looks
  for its own epoch before it commits and before it answers (at most every `CHECK_NS`), so that a
  broker that was stopped and continued, or was cut off, finds that it has been superseded and says
  nothing more. The new holder waits `YIELD_S` before it reads the old journals, which is longer
  than `CHECK_NS`.

What this does not cover: a holder that is stopped between its look and its write, and is continued
after the next one has read the journals, writes one more group of events.
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
BEAT_S = 2.0  # how often a holder shows that it lives
SILENT_S = 5 * BEAT_S  # a holder on another host that does not show it for so long is gone
_PREFIX = "epoch-"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass(frozen=True)
class FolderOwner:
    """A broker that took a folder: where it runs, since when, and which start of its Slurm job it
    belongs to (`restarts`: SLURM_RESTART_COUNT, -1 without Slurm)."""

    host: str
    pid: int
    since: str
    restarts: int = -1

    def show(self) -> str:
        """For a person: who it is."""
        return f"host {self.host}, pid {self.pid}, since {self.since}"


class FileLock:
    """The lock of a job's folder; `held` says whether it is ours. It ends with this process."""

    def __init__(self, folder: Path) -> None:
        self.held, self._fd = True, -1
        try:
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                self.held = False
            elif self._fd < 0:
                raise InvalidInput(f"job folder {folder}: cannot make the file `lock` in it "
                                   f"({error.strerror})") from None
            # else: a file system without locks; the epoch decides

    def release(self) -> None:
        """Lets another broker take it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FolderLock:
    """A folder that this broker holds: its epoch, made here. O(epochs in the folder), which is 1.

    Args:
        folder: the job's.
        file_lock: of this folder.
        restarts: of our start of the Slurm job; -1 without Slurm.

    Raises:
        InvalidInput: the folder cannot be written.
    """

    def __init__(self, folder: Path, file_lock: FileLock, restarts: int = -1) -> None:
        self.folder, self.file_lock = folder, file_lock
        self._lost, self._checked_at = False, 0
        me = FolderOwner(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S"),
                         restarts)
        self._mark = json.dumps({**vars(me), "word": secrets.token_hex(8)}).encode()
        before = _epochs(folder)
        self.earlier = bool(before)  # another broker had the folder before
        number = before[-1] + 1 if before else 1
        try:
            while not self._make(number):
                number += 1  # another one was quicker: it is superseded
            for old in _epochs(folder):
                if old < number:
                    _path(folder, old).unlink(missing_ok=True)
        except OSError as error:
            raise InvalidInput(f"job folder {folder}: cannot write there ({error.strerror})"
                               ) from None
        self._path = os.fspath(_path(folder, number))

    def superseded(self, now: bool = False) -> bool:
        """Whether another broker has taken the folder, or it is gone. Looks at most every
        `CHECK_NS`, or `now`; once true it stays true."""
        at = time.clock_gettime_ns(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps
        if self._lost or (at - self._checked_at < CHECK_NS and not now):
            return self._lost
        with suppress(OSError):  # it cannot be told, as with no free file descriptor: as before
            self._lost = _read(self._path) != self._mark
        self._checked_at = at
        return self._lost

    def beat(self) -> None:
        """Shows that this holder lives, to whoever cannot see its process."""
        if not self.superseded(now=True):
            with suppress(OSError):
                os.utime(self._path)

    def successor(self) -> str:
        """Who holds the folder now, for a person."""
        found = holder_of(self.folder)
        return found.show() if found is not None else "its folder was moved or removed"

    def _make(self, number: int) -> bool:
        """Whether this epoch is ours."""
        try:
            fd = os.open(_path(self.folder, number),
                         os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(fd, self._mark)
            os.fsync(fd)  # other nodes can read who we are
        finally:
            os.close(fd)
        return True


def holder_of(folder: Path) -> FolderOwner | None:
    """Who took a folder last; None: nobody, or a file that cannot be read."""
    found = _epochs(folder)
    if not found:
        return None
    try:
        told = json.loads(_read(_path(folder, found[-1])))
        return FolderOwner(str(told["host"]), int(told["pid"]), str(told["since"]),
                           int(told["restarts"]))
    except (ValueError, KeyError, TypeError):
        return None


def last_sign(folder: Path) -> int:
    """When the holder of a folder showed last that it lives, in ns by the file system's clock."""
    found = _epochs(folder)
    try:
        return os.stat(_path(folder, found[-1])).st_mtime_ns if found else 0
    except FileNotFoundError:
        return 0


def _epochs(folder: Path) -> list[int]:
    """The numbers of a folder's epochs, oldest first."""
    return sorted(int(path.name[len(_PREFIX):]) for path in folder.glob(f"{_PREFIX}*")
                  if path.name[len(_PREFIX):].isdigit())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{_PREFIX}{number}"


def _read(path: Path | str) -> bytes:
    """A file's content; empty when it is gone. Opening it asks a shared file system's server, which
    looking at its name alone does not."""
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
