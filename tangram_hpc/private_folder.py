"""Private folders on a node that are removed although a signal killed their makers.

Such a folder has mode 0700 and holds a lock file, which its maker locks for as long as it lives. A
killed process cannot remove its folder, but the kernel releases its lock. So others of the same
user can tell that the folder was abandoned, and they remove it when they make theirs: workers and
brokers all such folders (`storage/rundir.py`), clients those of clients.

The maker locks the folder itself as well. systemd-tmpfiles, which on many systems removes what
nobody has used in /tmp for ten days, passes over locked folders and what is below them. If another
program has removed the lock file as old, the lock of the folder still tells that the maker lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_ALIVE = ".alive"  # the lock file
_OF_CLIENTS = "tangram-client-"


class PrivateFolder:
    """A new folder that is this process's own.

    Attributes:
        path: where it is.

    Raises:
        OSError: the folder cannot be made; nothing is left of it.
    """

    def __init__(self, prefix: str, base: str) -> None:
        self.path, self._lock = tempfile.mkdtemp(prefix=prefix, dir=base), -1
        self._folder_lock = -1
        try:
            self._folder_lock = _open_folder(self.path)
            with suppress(OSError):  # NFS has no locks of folders; the lock file does there
                fcntl.flock(self._folder_lock, fcntl.LOCK_EX)
            # The lock file is locked before it gets its name. Another process that starts in this
            # moment takes a folder whose lock file is not locked for abandoned, and removes it.
            fresh = f"{self.path}/{_ALIVE}.new"
            self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(fresh, f"{self.path}/{_ALIVE}")
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes the folder with all that is in it, and releases its locks. It may be called
        again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.disown()

    def disown(self) -> None:
        """Closes the copies of the locks in the child of a fork, which would keep the folder locked
        after the parent's death."""
        locks, self._lock, self._folder_lock = (self._lock, self._folder_lock), -1, -1
        for lock in locks:
            if lock >= 0:
                os.close(lock)


def is_abandoned(folder: Path) -> bool | None:
    """Returns whether the maker of a folder is dead; None if the folder has no lock file.

    Raises:
        OSError: the lock file cannot be opened.
    """
    with suppress(OSError):
        if _is_locked(_open_folder(folder)):
            return False
    try:
        lock = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    return not _is_locked(lock)


def _open_folder(folder: Path | str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _is_locked(fd: int) -> bool:
    """Returns whether another process has locked an open file or folder, which it closes."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def client_folder() -> PrivateFolder:
    """Makes a folder for a socket of a client in the folder of temporary files, and removes those
    of clients of this user that were killed.

    Raises:
        OSError: the folder cannot be made.
    """
    base = tempfile.gettempdir()
    for old in Path(base).glob(f"{_OF_CLIENTS}*"):
        with suppress(OSError):  # another process removes it at the same time
            about = old.lstat()
            if (stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
                    and is_abandoned(old)):
                shutil.rmtree(old, ignore_errors=True)
    return PrivateFolder(_OF_CLIENTS, base)
