"""The folder of all jobs, which every node must see, and the node's own scratch.

Law: it works in a folder of its own and takes it away. Locks are tried by two processes; times are
medians, as one slow answer says nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..config.settings import gather, ignored_line
from ..storage.rundir import tangram_home
from .check import MACHINE, Finding, Item, Where, fail, ok, skip, warn

_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse.", "wekafs", "pvfs",
            "orangefs", "panfs", "glusterfs", "afs", "9p", "virtiofs", "quobyte", "vastfs")
_TIMES = 15
_SLOW_S = 0.05
_SKEW_S = 2.0
_ROOM_MIB = 1024
_LATE = "the file system does not answer: ask the site, or set TANGRAM_HOME to another one"


def nearest(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


class NoFolder(OSError):
    """None could be made. `tangram_home` and `scratch` say so; who else needs one does not
    apply."""


@contextmanager
def trial_folder(base: Path, prefix: str = ".tangram-doctor-") -> Iterator[Path]:
    """A private folder on the same file system, gone afterwards. Raises NoFolder."""
    there = nearest(base)
    try:
        folder = tempfile.mkdtemp(prefix=prefix, dir=there)
    except OSError as error:
        raise NoFolder(error.errno, error.strerror, str(there)) from None
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def scratch_base(where: Where) -> Path:
    """Where workers and brokers make their node-local folders, as `rundir.make_scratch`."""
    environ = where.environ
    return Path(where.config.scratch or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR")
                or tempfile.gettempdir())


def file_system(path: Path) -> str:
    """The type of the file system of a path; empty when it cannot be told."""
    real, best, kind = os.path.realpath(path), "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point, fs = line.split(" ")[1:3]
        point = point.replace("\\040", " ")
        above = point == "/" or real == point or real.startswith(point + "/")
        if above and len(point) >= len(best):  # a later mount covers an earlier one
            best, kind = point, fs
    return kind


def is_shared(kind: str) -> bool:
    """Whether a file system of this type can be on several nodes."""
    return kind.startswith(_NETWORK)


# ---- the folder of all jobs ----------------------------------------------------------------------


def folder(where: Where) -> Finding:
    """That it can be written, and seen by other nodes."""
    path = tangram_home(where.environ)
    there = nearest(path)
    kind = file_system(there)
    free = _free_mib(there)
    text = f"{path}{'' if path.exists() else ' (not made yet)'} on {kind or 'an unknown type'}, " \
           f"{free / 1024:.1f} GiB free"
    try:
        with trial_folder(path) as trial:
            (trial / "access.json").write_text("{}")
    except OSError as error:
        return fail(f"{text}: cannot be written ({error.strerror})",
                    "set TANGRAM_HOME to a folder of yours on a file system that all nodes share")
    if path.exists() and path.stat().st_uid != os.geteuid():
        return warn(f"{text}; it is user {path.stat().st_uid}'s", "set TANGRAM_HOME to your own")
    if free < _ROOM_MIB:
        return warn(text, "journals and results lie there: make room, or set TANGRAM_HOME")
    told_by_nodes = where.place is not None and sum(where.place.nodes) > 1
    if where.kind != MACHINE and not told_by_nodes and not is_shared(kind):
        return warn(f"{text}; it looks local to this node",
                    "set TANGRAM_HOME to a file system that all nodes share (where they do share "
                    "this one, `nodes` says so inside a job)")
    return ok(text)


def latency(where: Where) -> Finding:
    """A small file made, synced, looked at and removed."""
    with trial_folder(tangram_home(where.environ)) as trial:
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


def locking(where: Where) -> Finding:
    """That a lock of one process holds another one off."""
    text, holds = _locks(tangram_home(where.environ))
    return ok(text) if holds else warn(
        text, "nothing of a job locks there; put no database of yours there")


def clock(where: Where) -> Finding:
    """The file system's clock against ours."""
    with trial_folder(tangram_home(where.environ)) as trial:
        before = time.time()
        (trial / "now").write_text("x")
        after = time.time()
        stamp = (trial / "now").stat().st_mtime
    off = max(stamp - after, before - stamp, 0.0)
    if off > _SKEW_S:
        return warn(f"its clock and ours differ by {off:.1f} s",
                    "have the site synchronise them: the newest job is told by its files' times")
    return ok(f"its stamps and our clock agree{f' to {off * 1000:.0f} ms' if off else ''}")


# ---- scratch -------------------------------------------------------------------------------------


def scratch(where: Where) -> Finding:
    """Room, kind and rights of the folder that sandboxes lie in."""
    base = scratch_base(where)
    remedy = "set `scratch` (or TMPDIR) to a folder on the node's own disk"
    if not base.is_dir():
        return fail(f"{base} is no folder", remedy)
    try:
        with trial_folder(base, "tangram-doctor-") as trial:
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
    if free < max(_ROOM_MIB, where.config.disk_mib):
        return warn(f"{text}, less than one session may take ({where.config.disk_mib} MiB)",
                    "make room, set `disk_mib`, or set `scratch` to a larger disk")
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{text}: what sandboxes write there is memory", remedy)
    return ok(text)


def shared_memory(where: Where) -> Finding:
    """/dev/shm, by which MPI ranks of one node talk."""
    if not os.path.isdir("/dev/shm"):
        return warn("there is no /dev/shm", "MPI needs one: in a container, mount a tmpfs there")
    free = _free_mib(Path("/dev/shm"))
    try:
        with trial_folder(Path("/dev/shm"), "tangram-doctor-"):
            pass
    except OSError as error:
        return warn(f"/dev/shm cannot be written: {error.strerror}", "ask the site")
    text = f"{free} MiB free"
    return ok(text) if free >= 256 else warn(text, "make room in /dev/shm; in a container, give "
                                                   "it a larger one (--shm-size)")


def _free_mib(path: Path) -> int:
    told = os.statvfs(path)
    return told.f_bavail * told.f_frsize >> 20


def _runs(path: Path) -> bool:
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o700)
    return not os.statvfs(path).f_flag & os.ST_NOEXEC and os.access(path, os.X_OK)


def _locks(base: Path) -> tuple[str, bool]:
    """Whether flock holds between two processes, and the word for it."""
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
        return "flock of one process holds another off", True
    return ("flock does not hold another process off" if not held_off
            else "a flock that was let go stays"), False


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


def settings(where: Where) -> Finding:
    """That what a person has set can be read."""
    if where.wrong:
        return fail(where.wrong, "mend it; all else here was looked at with the defaults")
    found = gather(where.environ)
    own = sorted(k for k in where.environ if k.startswith("TANGRAM_"))
    told = "; ".join([*map(str, found.files), *([", ".join(own)] if own else [])])
    if found.ignored is not None:
        return warn(told or "all are the defaults", ignored_line(found.ignored, where.environ))
    return ok(told) if told else skip("all are the defaults")


CHECKS = (
    Item("settings", settings), Item("home", folder, 15.0, _LATE),
    Item("latency", latency, 30.0, _LATE), Item("locking", locking, 15.0, _LATE),
    Item("file clock", clock, 15.0, _LATE), Item("scratch", scratch, 15.0, _LATE),
    Item("/dev/shm", shared_memory),
)
