"""The job folders of one user: how large each is, whether its job may still need it, its removal.

A folder is removed while this process holds its lock, so that no broker starts in it meanwhile. It
is renamed first: a removal that is cut off leaves a hidden folder, which the next one takes along.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import DISK_FULL, InvalidInput
from .access import NAME as ACCESS
from .access import may_serve
from .folder_lock import FileLock, last_sign

RUNS, QUEUED, NOT_ASKED = "runs", "queued", "not asked"
ENDED, BROKEN_OFF = "ended", "broken off"
_SIGN_S = 60.0  # a broker on another node that gave a sign of life within so many seconds lives
_GOING = ".removing-"  # the beginning of the name of a folder that is being removed


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job.

    Attributes:
        path: The folder.
        state: RUNS (its broker lives), QUEUED (Slurm has the job, which may start again), NOT_ASKED
            (it is a Slurm job, and its cluster could not be asked), ENDED (in order), or
            BROKEN_OFF (its broker was killed; a job of this name goes on from it).
        size: What its files take on the disk, bytes.
        seen_ns: When one of its files was changed last, ns since the epoch.
    """

    path: Path
    state: str
    size: int
    seen_ns: int

    @property
    def needed(self) -> bool:
        """Whether the folder belongs to a job that runs or may be started again by Slurm."""
        return self.state in (RUNS, QUEUED)

    @property
    def over(self) -> bool:
        """Whether the folder belongs to a job that is known to be over."""
        return self.state in (ENDED, BROKEN_OFF)


@dataclass(frozen=True)
class SlurmQueue:
    """What one cluster has in its queue.

    Attributes:
        cluster: The cluster's name.
        jobs: The ids of this user's jobs there.
    """

    cluster: str
    jobs: frozenset[int]


def slurm_ids(home: Path) -> list[int]:
    """Returns the ids of all Slurm jobs that have a folder."""
    return sorted({int(number) for path in (home / "jobs").glob("*")
                   if (number := path.name.partition("@")[0]).isdecimal()})


def paths_of_jobs(home: Path) -> list[Path]:
    """Returns all that is in `$TANGRAM_HOME/jobs`: folders of jobs, links to them, and folders that
    are being removed; nothing if no job has run yet.

    Raises:
        InvalidInput: The folder is there and cannot be read.
    """
    try:
        return sorted((home / "jobs").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InvalidInput(f"TANGRAM_HOME {home}: the folder `jobs` cannot be read "
                           f"({error.strerror}); make it readable, or set TANGRAM_HOME to a folder "
                           "of your own") from None


def closed_folders(home: Path) -> dict[Path, str]:
    """Returns this user's folders in `$TANGRAM_HOME/jobs` whose files cannot be read, and why.

    Their journals would be taken for none. Folders of other users are left out: they are not ours
    to account for.

    Raises:
        InvalidInput: The folder of all jobs is there and cannot be read.
    """
    found = {}
    for folder in paths_of_jobs(home):
        try:
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                for name in os.listdir(folder)[:1]:  # a folder may be readable and yet closed
                    os.lstat(folder / name)
        except FileNotFoundError:
            continue  # it was removed at this moment
        except OSError as error:
            found[folder] = error.strerror or str(error)
    return found


def job_folders(home: Path, queue: SlurmQueue | None = None) -> list[JobFolder]:
    """Returns the job folders below `$TANGRAM_HOME`, those that were changed longest ago first.

    Other folders there are left out. O(files).

    Args:
        home: `$TANGRAM_HOME`.
        queue: What Slurm answered; None if it could not be asked.

    Raises:
        InvalidInput: The folder of all jobs cannot be read.
    """
    paths = paths_of_jobs(home)
    if not paths:
        return []
    now = _now_s(home)
    found = [_folder(path, queue, now) for path in paths if not path.name.startswith(".")
             and not path.is_symlink() and path.is_dir() and _is_job_folder(path)]
    return sorted(found, key=lambda each: (each.seen_ns, each.path))


def outdated(folders: Sequence[JobFolder], now_ns: int, older_ns: int | None, keep: int | None
             ) -> list[JobFolder]:
    """Returns the folders to remove. Those of jobs that are needed, or may be, are never among
    them. Pure.

    Args:
        folders: All folders, those that were changed longest ago first.
        now_ns: The time, ns since the epoch.
        older_ns: Remove what was not changed for longer than this, ns; None: nothing for its age.
        keep: Remove the oldest until all folders together take no more than this, bytes; None:
            nothing for its size.
    """
    total, found = sum(each.size for each in folders), []
    for each in folders:
        old = older_ns is not None and now_ns - each.seen_ns > older_ns
        if each.over and (old or (keep is not None and total > keep)):
            found.append(each)
            total -= each.size
    return found


def remove_job_folder(folder: Path) -> bool:
    """Removes a folder, and the link that leads to it; returns False if a broker has it by now.

    Raises:
        InvalidInput: It cannot be removed.
    """
    try:
        lock = FileLock(folder)
    except InvalidInput:
        if folder.exists():
            raise
        return True  # somebody else has just removed it
    try:
        if not lock.held or _gives_signs(folder, _now_s(folder.parent.parent)):
            return False
        going = folder.with_name(f"{_GOING}{folder.name}")
        shutil.rmtree(going, ignore_errors=True)  # what a removal that was cut off has left
        try:
            folder.rename(going)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            going = folder  # some file systems cannot rename when a quota is used up
        shutil.rmtree(going, ignore_errors=True)
        if going.exists():
            raise OSError(errno.EACCES, f"a part of it stays in {going}")
        link = folder.with_name(folder.name.partition("@")[0])
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInput(f"job folder {folder}: cannot be removed ({error.strerror})"
                           ) from None
    finally:
        lock.release()
    return True


def sweep_removed(home: Path) -> None:
    """Removes what removals that were cut off have left."""
    for path in (home / "jobs").glob(f"{_GOING}*"):
        shutil.rmtree(path, ignore_errors=True)


def is_served(folder: Path) -> bool:
    """Returns whether a broker has shown within the last minute that it serves this job."""
    return may_serve(folder) and _gives_signs(folder, _now_s(folder.parents[1]))


def _is_job_folder(path: Path) -> bool:
    return any(path.glob("journal*")) or any(path.glob("epoch-*")) or os.path.exists(
        path / ACCESS)  # raises nothing for a folder that we may not enter, as another user's


def _folder(path: Path, queue: SlurmQueue | None, now_s: float) -> JobFolder:
    size, seen_ns = 0, 0
    for base, _, names in os.walk(path):
        for name in (".", *names):
            with suppress(OSError):  # it has just gone
                about = os.lstat(os.path.join(base, name))
                size += about.st_blocks * 512
                if name not in (".", "lock"):
                    seen_ns = max(seen_ns, about.st_mtime_ns)
    return JobFolder(path, _state(path, queue, now_s), size, seen_ns or path.stat().st_mtime_ns)


def _state(path: Path, queue: SlurmQueue | None, now_s: float) -> str:
    if _gives_signs(path, now_s) or (may_serve(path) and _is_locked(path)):
        return RUNS
    number, _, cluster = path.name.partition("~")[0].partition("@")
    if number.isdecimal():
        if queue is None or cluster not in ("", queue.cluster):
            return NOT_ASKED
        if int(number) in queue.jobs:
            return QUEUED
    return BROKEN_OFF if may_serve(path) else ENDED


def _is_locked(path: Path) -> bool:
    if not (path / "lock").exists():
        return False  # no lock file is made in a folder that is only looked at
    with suppress(InvalidInput):
        lock = FileLock(path)
        lock.release()
        return not lock.held
    return True


def _gives_signs(path: Path, now_s: float) -> bool:
    """Returns whether a broker on any node has shown lately that it lives: one that serves, or one
    that has taken the folder and does not serve yet.
    """
    sign_ns = last_sign(path)
    try:
        fresh = may_serve(path) or sign_ns > (path / ACCESS).stat().st_mtime_ns
    except OSError:
        fresh = True  # there is no access file yet
    return fresh and now_s - sign_ns / 1e9 < _SIGN_S


def _now_s(home: Path) -> float:
    """Returns the time by the clock of the home's file system, which signs of life are stamped by.
    """
    try:
        with tempfile.TemporaryFile(dir=home / "jobs") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
