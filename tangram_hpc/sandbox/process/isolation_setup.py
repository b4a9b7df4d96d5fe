"""Isolates an execution process as its box asks, once, before anything else runs in it.

A `process` sandbox confines itself by Landlock and a system call filter. With another backend a
container runtime starts a pause process, and this process enters its namespaces. There is no way
back from either. What the sandbox looks like from within is told to its init. No command is started
here.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ...protocol.process_frames import Setup
from ...resources import process_tree
from ...resources.cpu import cgroupfs
from ..files import modes, scratch
from ..isolation import etc, image_root, join, landlock, seccomp, visible_paths
from ..isolation.container_runtimes import (
    IMAGE,
    RUNTIMES,
    SESSION,
    TMP,
    UNITS,
    ContainerSpec,
    container_name,
    tmp_names,
)
from ..isolation.image_root import ImageRoot
from ..isolation.pause_process import PauseFailed, PauseProcess
from .bootstrap import MODES
from .sandbox_processes import DescendantProcesses, NamespaceProcesses, SandboxProcesses
from .units_file import path_of

_END_S = 2.0
_READY_S = 60.0  # the runtime may have to unpack an image


_NO_LISTENER = ("backend: process cannot build a sandbox here: a system call filter with a "
                "listener already holds this worker, and the kernel allows one; start it outside "
                "of that container, or use bwrap")


class Unbuildable(Exception):
    """The sandbox cannot be built; the text is one line that says why."""


@dataclass(frozen=True)
class SandboxIsolation:
    """The isolation of a sandbox.

    Attributes:
        name: what it really is, for records.
        processes: reaches its processes.
        home: the session's directory, as its commands name it.
        tmp: the directory for temporary files, as its commands name it.
        units: the file that tells a command how many CPUs it has.
        own_root: whether commands see another root than the node's.
        changes: where an image that may be written keeps what was changed; else None. The sandbox's
            user is 0 then.
        pause: the pause process, where there is one.
        own: the numbers of the processes of `pause` inside.
        nodes: names in `tmp` that are read-only mounts of the node's files.
    """

    name: str
    processes: SandboxProcesses
    home: str
    tmp: str
    units: str
    own_root: bool = False
    changes: ImageRoot | None = None
    pause: PauseProcess | None = None
    own: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()


def build(setup: Setup, home: str) -> SandboxIsolation:
    """Isolates this process for good.

    Raises:
        Unbuildable: it cannot be isolated as promised.
    """
    box = setup.box
    try:
        cgroupfs.join(setup.joins)
        if box.backend != "process" or box.trusted:
            os.close(MODES)
        if box.backend == "process":
            return _process(setup, home)
        if image_root.recorded(home) is not None and not setup.root:
            raise Unbuildable("image: the session's files are changes to an image; open it with "
                              "that image and with writable=True")
        return _rooted(setup, home) if setup.root else _held(setup, home)
    except image_root.Unusable as error:
        raise Unbuildable(str(error)) from None
    except PauseFailed as error:
        process_tree.end_beneath(_END_S)
        raise Unbuildable(f"backend: {box.backend} cannot build a sandbox here ({error})") from None
    except OSError as error:
        if box.backend == "process" and error.errno == errno.EBUSY:
            raise Unbuildable(_NO_LISTENER) from None
        what = error.strerror or str(error)
        if box.image and error.filename == box.image:
            raise Unbuildable(f"image: {box.image}: {what}") from None
        raise Unbuildable(f"backend: {box.backend} cannot build a sandbox here ({what})") from None


def _process(setup: Setup, home: str) -> SandboxIsolation:
    isolation, box = "process", setup.box
    if not box.trusted:
        read = [*setup.read, visible_paths.PROC, path_of(home)]
        write = [scratch.home(home), scratch.tmp(home), *visible_paths.devices()]
        found = landlock.restrict(read, write, network=box.network)
        isolation += f"+landlock{found}"
        if seccomp.available():
            listener = seccomp.restrict(namespaced=False, network=box.network,
                                        sampled=setup.watch)
            modes.hand_over(MODES, listener)
            isolation += "+seccomp"
    return SandboxIsolation(isolation, DescendantProcesses(), scratch.home(home), scratch.tmp(home),
                            path_of(home))


def _held(setup: Setup, home: str) -> SandboxIsolation:
    box, runtime = setup.box, RUNTIMES[setup.box.backend]
    what = _container(setup, home)
    pause = PauseProcess(runtime.argv(what), runtime.env(os.environ), _READY_S)
    inner = IMAGE if box.image and box.backend == "bwrap" else ""
    join.enter(pause.inside, SESSION, inner)
    isolation = box.backend
    if not box.trusted and seccomp.available():
        seccomp.restrict(namespaced=True, network=box.network, sampled=setup.watch)
        isolation += "+seccomp"
    own = _own()
    return SandboxIsolation(isolation, NamespaceProcesses(own), SESSION, TMP, UNITS,
                            bool(box.image), None, pause, own, tmp_names(what))


def _rooted(setup: Setup, home: str) -> SandboxIsolation:
    """A sandbox with an image that it may write. Its user is 0 and the only one, so the filter lets
    calls that change users and owners succeed without effect, in trusted code as well.
    """
    box, runtime = setup.box, RUNTIMES[setup.box.backend]
    if not seccomp.available():
        raise Unbuildable("image: this kernel cannot filter system calls, which a root that can be "
                          "written needs; pass writable=False")
    root = image_root.prepare(setup.root, box.image, home, box.network)
    what = _container(setup, home, root.folder)
    pause = PauseProcess(runtime.argv(what), runtime.env(os.environ), _READY_S, root.enter)
    join.enter(pause.inside, SESSION, IMAGE, image_root.KEPT)
    os.umask(0o022)  # as root has it; the scratch directory is closed to others
    image_root.settle_in()
    seccomp.restrict(namespaced=True, network=box.network, sampled=setup.watch, rootlike=True,
                     trusted=box.trusted)
    isolation = f"{box.backend}+{root.way}{'' if box.trusted else '+seccomp'}"
    own = _own()
    return SandboxIsolation(isolation, NamespaceProcesses(own), SESSION, TMP, UNITS, True,
                            root, pause, own)


def _container(setup: Setup, home: str, root: str = "") -> ContainerSpec:
    box, files = setup.box, [(path_of(home), UNITS)]
    if not box.image:
        files.insert(0, (setup.etc, "/etc"))
    return ContainerSpec(home, box.image, box.network, etc.others(setup.read), files,
                         name=container_name(home), root=root)


def _own() -> frozenset[int]:
    """The pause process and its children, seen from inside, before anything else runs there."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
