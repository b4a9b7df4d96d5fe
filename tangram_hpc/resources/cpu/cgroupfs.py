"""The cgroup file systems: where they are mounted, where this process is in them, and their files.

It also makes and recognises the names of workers' cgroups, by which the cgroups of a dead worker
are found. What a limit means is not known here.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

PREFIX = "tangram-"
STEP = "tangram-job"  # the name that slurm/spank gives the cgroup of a job step
# holds workers while their cgroup enables controllers for its children (v2)
LEAF = "tangram-workers"
_NAME = re.compile(r"tangram-(\d+)-(\d+)-(\d+)-(\d+)$")
_OCTAL = re.compile(r"\\([0-7]{3})")
_PAUSE_S = 0.002


class Mount(NamedTuple):
    """A mounted cgroup file system.

    Attributes:
        root: the cgroup that is visible at `point`.
        point: where it is mounted.
        kind: "cgroup" or "cgroup2".
        controllers: the controllers of a version 1 mount; version 2 names them in a file instead.
    """

    root: str
    point: str
    kind: str
    controllers: frozenset[str]


def _plain(path: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def mounts() -> list[Mount]:
    """The cgroup file systems of this mount namespace, in the order in which they were mounted."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            kind, _, options = rest.split(None, 2)
            if kind in ("cgroup", "cgroup2"):
                root, point = fields.split()[3:5]
                names = frozenset(options.strip().split(","))
                found.append(Mount(_plain(root), _plain(point), kind, names))
    return found


def own_folder(controller: str) -> str:
    """Returns the folder of this process's cgroup: of a version 1 controller, or "" for version 2.

    Raises:
        OSError: the cgroup is not mounted, or lies outside of the mounted part.
    """
    path = ""
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, where = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                path = where
    for mount in mounts():
        if controller not in mount.controllers if controller else mount.kind != "cgroup2":
            continue
        root = mount.root.rstrip("/")
        if path != root and not path.startswith(root + "/"):
            continue
        folder = (mount.point + path[len(root):]).rstrip("/")
        with suppress(OSError):
            if os.getpid() in _listed(folder):
                return folder
    raise OSError(f"{controller or 'cgroup2'} is not mounted here, or not with our own cgroup")


# ---- files ----


def read(path: str) -> str:
    """The text of a cgroup's file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(fd, 65536):
            pieces.append(piece)
    finally:
        os.close(fd)
    return b"".join(pieces).decode()


def write(path: str, text: str) -> None:
    """Writes a cgroup's file in one call. Raises an OSError that says what could not be written."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {text!r} ({error.strerror})", path) from None


def make(path: str) -> None:
    """Makes a cgroup. Raises an OSError that names it; FileExistsError when it exists."""
    try:
        os.mkdir(path, 0o755)
    except OSError as error:
        raise OSError(error.errno, f"cannot make a cgroup ({error.strerror})", path) from None


def put(folder: str, pid: int) -> None:
    """Moves a process with all of its threads into a cgroup. Raises OSError."""
    write(folder + "/cgroup.procs", str(pid))


def join(files: Iterable[str]) -> None:
    """Moves this process, which has one thread, into a group by the group's files. Raises OSError.
    """
    for path in files:
        write(path, "0")


def flat_keyed(path: str, key: str) -> int | None:
    """One number of a file of "key number" lines; None when it cannot be read."""
    with suppress(OSError, ValueError):
        for line in read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return None


def number(path: str) -> int | None:
    """The number in a file; None when it cannot be read."""
    with suppress(OSError, ValueError):
        return int(read(path))
    return None


# ---- members ----


def _listed(folder: str) -> list[int]:
    return [int(text) for text in read(folder + "/cgroup.procs").split()]


def beneath(folder: str) -> Iterator[str]:
    """Returns a cgroup and all cgroups beneath it, the deepest first."""
    for here, _, _ in os.walk(folder, topdown=False):
        yield here


def members(folder: str) -> list[int]:
    """Returns the processes of a cgroup and of all cgroups beneath it.

    A process of another pid namespace, which this process cannot see, is listed as 0.
    """
    found: list[int] = []
    for here in beneath(folder):
        with suppress(OSError):
            found += _listed(here)
    return found


def kill_members(folder: str, spare: frozenset[int] = frozenset()) -> None:
    """Kills the processes that are listed now, except `spare`."""
    for pid in members(folder):
        if pid > 0 and pid not in spare:
            with suppress(OSError):  # gone meanwhile
                os.kill(pid, signal.SIGKILL)


def discard(folder: str) -> bool:
    """Removes a cgroup and all beneath it if nothing lives in them; returns whether it is gone."""
    try:
        os.rmdir(folder)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        for here in beneath(folder):
            with suppress(OSError):
                os.rmdir(here)
    return not os.path.isdir(folder)


def destroy(folders: list[str], seconds: float) -> list[str]:
    """Kills the processes in cgroups and removes the cgroups; returns those that could not be
    removed within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while folders := [folder for folder in folders if not discard(folder)]:
        for folder in folders:
            kill_members(folder)
        if time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE_S)
    return folders


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Keeps other workers from changing the same cgroup. The lock of a dead worker is free."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# ---- names ----


def started(pid: int) -> int:
    """When a process started, in clock ticks since the boot; 0 when it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


_count = 0


def new_name() -> str:
    """Returns a new name for a cgroup of this process: tangram-PID-START-NAMESPACE-COUNT."""
    global _count
    _count += 1
    pid = os.getpid()
    return f"{PREFIX}{pid}-{started(pid)}-{_pid_namespace()}-{_count}"


def is_ours(name: str) -> bool:
    """Whether a cgroup was named by `new_name`, here or elsewhere."""
    return _NAME.match(name) is not None


def is_left(name: str) -> bool:
    """Whether a cgroup's worker is dead. A worker of another pid namespace, whose process is not
    visible here, counts as alive.
    """
    found = _NAME.match(name)
    if found is None:
        return False
    pid, start, namespace = int(found[1]), int(found[2]), int(found[3])
    return namespace == _pid_namespace() and started(pid) != start
