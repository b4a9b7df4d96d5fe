"""Tests whether a container runtime works here, by building a tiny sandbox and entering it.

A process that has entered a sandbox cannot leave it. So a process of its own makes the test, and
never one that shall live on. Where a runtime works, the same process finds out how it can let a
sandbox write an image: the tiny image that it tries has one file and one folder.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ...resources import process_tree
from ...start_module import module_command
from .. import user_namespace
from ..files import scratch
from ..isolation import image_root, join, seccomp
from ..isolation.container_runtimes import (
    IMAGE,
    RUNTIMES,
    SESSION,
    ContainerSpec,
    Runtime,
    missing,
)
from ..isolation.pause_process import PauseFailed, PauseProcess
from ..process import bootstrap
from ..user_namespace import NoRange, UserMap
from . import network_probe

_PARTS = 4  # as many times the limit of one sandbox may all of it take


class RuntimeReport(msgspec.Struct):
    """What was found out about a runtime.

    Attributes:
        why_not: empty when it works, else one line that says why not.
        root: how it can let a sandbox write an image, one of `image_root.WAYS`; empty if it cannot.
        why_no_root: for each way that does not work, one line that says why.
        why_not_open: empty when it can give a sandbox an open network, else one line that says why
            not.
        users: which users such a sandbox can have, as the fields of a `UserMap`; empty for user 0
            alone.
        why_no_users: in one line, why there is user 0 alone; empty if there are several users.
        old_bwrap: whether it is a bwrap older than 0.8; see `ContainerSpec`.
        resets_sigchld: whether it is a bwrap that resets SIGCHLD; see `ContainerSpec`.
        late: whether it was not tried to the end in time, so that it may work all the same.
    """

    why_not: str = ""
    root: str = ""
    why_no_root: dict[str, str] = {}
    users: tuple[str, ...] = ()
    why_no_users: str = ""
    why_not_open: str = ""
    old_bwrap: bool = False
    resets_sigchld: bool = False
    late: bool = False


def probe(runtime: Runtime, image: str, read: Sequence[str], seconds: float) -> str:
    """Returns an empty string when the runtime works, else one line that says why not. Takes
    `seconds` and a little more.
    """
    return examine(runtime, image, read, seconds).why_not


def examine(runtime: Runtime, image: str, read: Sequence[str], seconds: float, folder: str = ""
            ) -> RuntimeReport:
    """Tries a runtime.

    Args:
        runtime: the runtime.
        image: an image, if the runtime needs one.
        read: paths of the node that its sandboxes may read.
        seconds: how long it may take to build a sandbox. The whole may take `_PARTS` times as long,
            since it builds several, and begins with a new process of Python, whose imports take a
            minute from a busy shared file system.
        folder: where the scratch directories will be, on whose file system an overlay depends;
            empty for where temporary files are.
    """
    if reason := missing(runtime):
        return RuntimeReport(reason)
    if runtime.needs_image and not image:
        return RuntimeReport(f"{runtime.name} needs an image, and none was named to try it with")
    argv = module_command(__name__, str(os.getpid()), runtime.name, image, str(seconds), folder,
                          *read)
    limit = seconds * _PARTS
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return RuntimeReport(f"{runtime.name} was not tried to the end in {limit:g} s", late=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        lines += done.stderr.strip().splitlines()
        return RuntimeReport(lines[-1] if lines else f"{runtime.name} does not work")
    # what stderr has then is not the probe's, such as the loader's warning about LD_PRELOAD
    return msgspec.json.decode(lines[-1], type=RuntimeReport) if lines else RuntimeReport()


def main(parent: int, name: str, image: str, seconds: float, folder: str, read: Sequence[str]
         ) -> int:
    """Runs in the process that makes the test; prints a line and returns a nonzero status when the
    test fails, or when `parent`, the process that started this one, has ended.
    """
    bootstrap.guard("tangram-probe", 9)
    # No signal comes for a parent that ended while this interpreter started. Its folder may be gone
    # by now, and a new one elsewhere would stay if this process were killed as well.
    if os.getppid() != parent:
        return 1
    runtime = RUNTIMES[name]
    there = folder if os.path.isdir(folder) else None
    with tempfile.TemporaryDirectory(prefix="tangram-probe-", dir=there) as place:
        home = os.path.join(place, "home")
        scratch.make(home)
        box = ContainerSpec(home, image, read=read, name=f"tangram-probe-{os.getpid()}",
                            old_bwrap=name == "bwrap" and _is_old_bwrap())
        status = _forked(lambda: _try(runtime, box, seconds))
        if not status and name == "bwrap" and _forked(
                lambda: _resets_sigchld(runtime, box, seconds)):
            box = replace(box, resets_sigchld=True)
            status = _forked(lambda: _try(runtime, box, seconds))
        if (command := runtime.clean_up(box.name)) and status:
            subprocess.run(command, capture_output=True, timeout=seconds)
        if not status and name == "bwrap":
            report = _report(place, box, seconds)
            report.why_not_open = network_probe.why_not_open(runtime, box, seconds)
            print(msgspec.json.encode(report).decode(), flush=True)
        for name in os.listdir(place):  # an overlay leaves a folder that it has closed
            scratch.remove(os.path.join(place, name))
    return status


def _is_old_bwrap() -> bool:
    """Whether bwrap is older than 0.8. Its list of options says so: some sites have a wrapper
    around it, or a version with patches.
    """
    done = subprocess.run(["bwrap", "--help"], capture_output=True, stdin=subprocess.DEVNULL)
    return not all(option in done.stdout for option in (b"--disable-userns", b"--perms", b"--size"))


def _resets_sigchld(runtime: Runtime, box: ContainerSpec, seconds: float) -> bool:
    """Whether bwrap gives its program the default action of SIGCHLD. It is not told by the version,
    as distributions mend older ones.
    """
    bootstrap.guard("tangram-probe", 9)
    try:
        pause = PauseProcess(runtime.argv(box), runtime.env(os.environ), seconds)
    except PauseFailed:  # so it is tried once more, which says why
        return True
    try:
        return not pause.reaps()
    finally:
        pause.end()


def _forked(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(work())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    process_tree.end_beneath(2.0)
    return status


def _report(place: str, box: ContainerSpec, seconds: float) -> RuntimeReport:
    """Tries the ways to write an image, until one works."""
    report = RuntimeReport(old_bwrap=box.old_bwrap, resets_sigchld=box.resets_sigchld)
    image = os.path.join(place, "image")
    os.makedirs(os.path.join(image, "etc", "old"))
    with open(os.path.join(image, "etc", "passwd"), "w") as file:
        file.write("root:x:0:0::/root:/bin/sh\n")
    several: UserMap | None = None
    try:
        several = user_namespace.several()
    except NoRange as error:
        report.why_no_users = str(error)
    for way in image_root.WAYS:
        reason = image_root.missing(way)
        if not reason and several is not None:
            home = os.path.join(place, f"{way}-users")
            reason = _why_no_root(way, replace(box, home=home, image=image), seconds, several)
            if not reason:
                report.root, report.users = way, tuple(several)
                return report
            report.why_no_users, reason = reason, ""
        box = replace(box, home=os.path.join(place, way), image=image)
        reason = reason or _why_no_root(way, box, seconds, None)
        if not reason:
            report.root = way
            break
        report.why_no_root[way] = reason
    return report


def _why_no_root(way: str, box: ContainerSpec, seconds: float, users: UserMap | None) -> str:
    why = f"{box.home}.why"
    scratch.make(box.home)

    def work() -> int:
        bootstrap.guard("tangram-probe", 9)
        try:
            if not seccomp.available():
                raise OSError(errno.ENOSYS, "this kernel cannot filter system calls")
            _write_in_image(way, box, seconds, users)
        except (OSError, PauseFailed, image_root.Unusable) as error:
            with open(said, "w") as file:
                file.write(" ".join(str(error).split()) or "it does not work")
            return 1
        return 0

    with open(why, "w") as file:
        said = os.dup(file.fileno())
    if not _forked(work):
        return ""
    with open(why) as told:
        return told.read() or "it does not work"


def _write_in_image(way: str, box: ContainerSpec, seconds: float, users: UserMap | None) -> None:
    root = image_root.prepare(way, box.image, box.home, "", users)
    if root.way != way:
        raise OSError(errno.EPERM, "files that this process makes are not its own here")
    box = replace(box, root=root.folder)
    runtime = RUNTIMES["bwrap"]
    pause = PauseProcess(runtime.argv(box), runtime.env(os.environ), seconds, root.enter,
                         root.map_users)
    try:
        keep = image_root.KEPT_OF_SEVERAL if users else image_root.KEPT
        join.enter(pause.inside, "/", IMAGE, keep,
                   sizes=runtime.unlimited(box))
        if users:
            os.chown("/etc/passwd", 65534, 65534)
        with open("/etc/passwd", "a") as file:
            file.write("one:x:1:1::/:/bin/sh\n")
        os.rmdir("/etc/old")
        os.mkdir("/etc/old")
        os.unlink("/etc/passwd")
        if "passwd" in os.listdir("/etc"):
            raise OSError(errno.EIO, "a file that was removed is still there")
    finally:
        pause.end()


def _try(runtime: Runtime, box: ContainerSpec, seconds: float) -> int:
    try:
        bootstrap.guard("tangram-probe", 9)
        pause = PauseProcess(runtime.argv(box), runtime.env(os.environ), seconds)
        try:
            join.enter(pause.inside, SESSION, bar_users=box.old_bwrap,
                       sizes=runtime.unlimited(box))
            pid = os.posix_spawn("/bin/sh", ["sh", "-c", "echo x >probe"], {})
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            pause.end()
    except (OSError, PauseFailed) as error:
        print(f"{runtime.name}: {error}", flush=True)
        return 1
    if code:
        print(f"{runtime.name}: a test command ended with {code}", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5],
                  sys.argv[6:]))
