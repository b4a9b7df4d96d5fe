"""Checks the folder of all jobs, which every node must see, and the node's own scratch folder.

The checks work in a folder of their own and remove it. Locks are tried by two processes. Times are
medians, because one slow answer says nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config.settings import gather, ignored_line, misspelt_variables
from ..storage.access import NAME as ACCESS
from ..storage.rundir import tangram_home
from .check import MACHINE, CheckContext, CheckSpec, Finding, fail, ok, skip, warn

_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse.", "wekafs", "pvfs",
            "orangefs", "panfs", "glusterfs", "afs", "9p", "virtiofs", "quobyte", "vastfs")
_TIMES = 15
_SLOW_S = 0.05
_SKEW_S = 2.0
_FREE_MIN_MIB = 1024
_PREFIX = ".tangram-doctor-"
_TRIAL = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as `mkdtemp` names folders
_ABANDONED_S = 3600.0  # no check takes so long: who made such a trial folder was killed
_LATE = "the file system does not answer: ask the site, or set TANGRAM_HOME to another one"


def nearest(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that exists; of a link whose target is
    missing, above the target, as on a file system that removes what is old."""
    if not path.exists():
        path = Path(os.path.realpath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


class NoFolder(OSError):
    """Raised when no trial folder could be made.

    The checks `home` and `scratch` report the failure. Other checks that need a folder are skipped.
    """


@contextmanager
def trial_folder(base: Path, prefix: str = _PREFIX) -> Iterator[Path]:
    """Yields a private folder on the file system of `base`, and removes it afterwards. Folders of
    this user that killed runs have left there are removed first.

    Raises:
        NoFolder: No folder could be made there.
    """
    there = nearest(base)
    _sweep(there)
    try:
        folder = tempfile.mkdtemp(prefix=prefix, dir=there)
    except OSError as error:
        raise NoFolder(error.errno, error.strerror, str(there)) from None
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(there: Path) -> None:
    # Their age tells them, and no lock: file systems without locks are a finding of these checks.
    with suppress(OSError):  # such as one that another run removes at the same time
        for old in there.iterdir():
            if not _TRIAL.fullmatch(old.name):  # such as a folder of the user's for its output
                continue
            about = old.lstat()
            if (stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
                    and time.time() - about.st_mtime > _ABANDONED_S):
                shutil.rmtree(old, ignore_errors=True)


def scratch_base(context: CheckContext) -> Path:
    """Returns where workers and brokers make their node-local folders, as `rundir.make_scratch`
    does.
    """
    environ = context.environ
    return Path(context.config.scratch or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR")
                or tempfile.gettempdir())


def file_system(path: Path) -> str:
    """Returns the type of a path's file system; empty if it cannot be found out."""
    real, best, kind = os.path.realpath(path), "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point, fs = line.split(" ")[1:3]
        point = point.replace("\\040", " ")
        above = point == "/" or real == point or real.startswith(point + "/")
        if above and len(point) >= len(best):  # a later mount covers an earlier one
            best, kind = point, fs
    return kind


def is_shared(kind: str) -> bool:
    """Returns whether a file system of this type can be on several nodes."""
    return kind.startswith(_NETWORK)


# ---- the folder of all jobs ----------------------------------------------------------------------


def folder(context: CheckContext) -> Finding:
    """Checks that the folder of all jobs can be written and is seen by other nodes."""
    path = tangram_home(context.environ)
    there = nearest(path)
    kind = file_system(there)
    free = _free_mib(there)
    text = f"{path}{'' if path.exists() else ' (not made yet)'} on {kind or 'an unknown type'}, " \
           f"{free / 1024:.1f} GiB free"
    try:
        with trial_folder(path) as trial:
            (trial / ACCESS).write_text("{}")
    except OSError as error:
        return fail(f"{text}: cannot be written ({error.strerror})",
                    "set TANGRAM_HOME to a folder of yours on a file system that all nodes share")
    if path.exists() and path.stat().st_uid != os.geteuid():
        return warn(f"{text}; it is user {path.stat().st_uid}'s", "set TANGRAM_HOME to your own")
    if free < _FREE_MIN_MIB:
        return warn(text, "journals and results lie there: make room, or set TANGRAM_HOME")
    checked_by_nodes = context.place is not None and sum(context.place.nodes) > 1
    if context.kind != MACHINE and not checked_by_nodes and not is_shared(kind):
        return warn(f"{text}; it looks local to this node",
                    "set TANGRAM_HOME to a file system that all nodes share (where they do share "
                    "this one, `nodes` says so inside a job)")
    return ok(text)


def latency(context: CheckContext) -> Finding:
    """Measures making, syncing, examining and removing a small file."""
    with trial_folder(tangram_home(context.environ)) as trial:
        steps = [_one_file(trial / str(n)) for n in range(_TIMES)]
    median = [statistics.median(step[i] for step in steps) * 1000 for i in range(4)]
    total = statistics.median(sum(step) for step in steps)
    text = "create {:.2f}, fsync {:.2f}, stat {:.2f}, unlink {:.2f} ms (medians of {})".format(
        *median, _TIMES)
    if total > _SLOW_S:
        return warn(text, "jobs start and end slower, and `sync = \"batch\"` waits for it: use a "
                          "faster TANGRAM_HOME")
    return ok(text)


def _one_file(path: Path) -> tuple[float, float, float, float]:
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, b"x")
    mark()
    os.fsync(fd)
    mark()
    os.close(fd)
    os.stat(path)
    mark()
    os.unlink(path)
    mark()
    a, b, c, d = (after - before for before, after in itertools.pairwise(marks))
    return a, b, c, d


def locking(context: CheckContext) -> Finding:
    """Checks that a lock of one process keeps another one out."""
    text, holds = _locks(tangram_home(context.environ))
    return ok(text) if holds else warn(
        text, "jobs work without locks; put no database there")


def clock(context: CheckContext) -> Finding:
    """Compares the file system's clock with ours."""
    with trial_folder(tangram_home(context.environ)) as trial:
        before = time.time()
        (trial / "now").write_text("x")
        after = time.time()
        stamp = (trial / "now").stat().st_mtime
    off = max(stamp - after, before - stamp, 0.0)
    if off > _SKEW_S:
        return warn(f"its clock and ours differ by {off:.1f} s",
                    "have the site synchronise them: the newest job is found by its files' times")
    return ok(f"its time stamps and our clock agree{f' to {off * 1000:.0f} ms' if off else ''}")


# ---- scratch -------------------------------------------------------------------------------------


def scratch(context: CheckContext) -> Finding:
    """Checks free space, file system type and permissions of the folder in which sandboxes are."""
    base = scratch_base(context)
    remedy = "set `scratch` (or TMPDIR) to a folder on the node's own disk"
    try:
        if not stat.S_ISDIR(os.stat(base).st_mode):
            return fail(f"{base} is no folder", remedy)
        with trial_folder(base) as trial:
            runs = _runs(trial / "run")
    except OSError as error:
        return fail(f"{base}: {error.strerror}", remedy)
    kind, free = file_system(base), _free_mib(base)
    text = f"{base} on {kind}, {free / 1024:.1f} GiB free"
    text_holds, holds = _locks(base)
    if not holds:
        return fail(f"{text}: {text_holds}", remedy)
    if not runs:
        return warn(f"{text}; programs in it cannot be run (noexec)", remedy)
    if is_shared(kind):
        return warn(f"{text}: a shared file system makes sandboxes slow", remedy)
    if free < max(_FREE_MIN_MIB, context.config.disk_mib):
        return warn(f"{text}, less than one session may take ({context.config.disk_mib} MiB)",
                    "make room, set `disk_mib`, or set `scratch` to a larger disk")
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{text}: what sandboxes write there takes memory", remedy)
    return ok(text)


def shared_memory(context: CheckContext) -> Finding:
    """Checks /dev/shm, through which MPI ranks of one node exchange messages."""
    if not os.path.isdir("/dev/shm"):
        return warn("there is no /dev/shm", "MPI needs one: in a container, mount a tmpfs there")
    free = _free_mib(Path("/dev/shm"))
    try:
        with trial_folder(Path("/dev/shm")):
            pass
    except OSError as error:
        return warn(f"/dev/shm cannot be written: {error.strerror}", "ask the site")
    text = f"{free} MiB free"
    return ok(text) if free >= 256 else warn(text, "make room in /dev/shm; in a container, give "
                                                   "it a larger one (--shm-size)")


def _free_mib(path: Path) -> int:
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize >> 20


def _runs(path: Path) -> bool:
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o700)
    return not os.statvfs(path).f_flag & os.ST_NOEXEC and os.access(path, os.X_OK)


def _locks(base: Path) -> tuple[str, bool]:
    """Returns a text and a bool: whether flock works between two processes."""
    with trial_folder(base) as trial:
        mine = os.open(trial / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held_off = not _in_child(lambda: _can_lock(trial / "lock"))
            fcntl.flock(mine, fcntl.LOCK_UN)
            let_in = _in_child(lambda: _can_lock(trial / "lock"))
        except OSError as error:
            return f"flock: {error.strerror}", False
        finally:
            os.close(mine)
    if held_off and let_in:
        return "flock keeps a second process out", True
    return ("flock does not keep a second process out" if not held_off
            else "a released flock still keeps a second process out"), False


def _can_lock(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_child(act: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = 0 if act() else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, 1):
        raise OSError(0, "the second process could not open the file")
    return status == 0


def settings(context: CheckContext) -> Finding:
    """Checks that the user's settings can be read."""
    if context.wrong:
        return fail(context.wrong, "correct it; all other checks used the defaults")
    found = gather(context.environ)
    own = sorted(k for k in context.environ if k.startswith("TANGRAM_"))
    sources = "; ".join([*map(str, found.files), *([", ".join(own)] if own else [])])
    if found.ignored is not None:
        return warn(sources or "all are the defaults", ignored_line(found.ignored, context.environ))
    misspelt = misspelt_variables(context.environ)
    if misspelt:
        return warn(sources, "; ".join(misspelt))
    return ok(sources) if sources else skip("all are the defaults")


CHECKS = (
    CheckSpec("settings", settings), CheckSpec("home", folder, 15.0, _LATE),
    CheckSpec("latency", latency, 30.0, _LATE), CheckSpec("locking", locking, 15.0, _LATE),
    CheckSpec("file clock", clock, 15.0, _LATE), CheckSpec("scratch", scratch, 15.0, _LATE),
    CheckSpec("/dev/shm", shared_memory),
)
