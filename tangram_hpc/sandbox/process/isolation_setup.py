"""Isolates an execution process as its box asks, once, before anything else runs in it.

A `process` sandbox confines itself by Landlock and a system call filter. With another backend a
container runtime starts a pause process, and this process enters its namespaces. There is no way
back from either. What the sandbox looks like from within is told to its init. No command is started
here.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from contextlib import ExitStack
from dataclasses import dataclass

from ...domain.session import OPEN, leads_outside
from ...protocol.process_frames import SandboxSpec, Setup
from ...resources import process_tree
from ...resources.cpu import cgroupfs
from ..files import modes, root_record, scratch
from ..isolation import etc, image_root, join, landlock, seccomp, visible_paths
from ..isolation.container_runtimes import (
    IMAGE,
    RUNTIMES,
    SESSION,
    TMP,
    UNITS,
    ContainerSpec,
    container_name,
    devices,
    tmp_names,
)
from ..isolation.image_root import ImageRoot
from ..isolation.pause_process import PauseFailed, PauseProcess
from ..network.name_relay import RESOLV_CONF, resolv_conf
from ..network.open_network import NoOpenNetwork, OpenNetwork
from ..network.proxy_process import ProxyProcess
from ..user_namespace import UserMap
from .bootstrap import MODES
from .sandbox_processes import DescendantProcesses, NamespaceProcesses, SandboxProcesses
from .units_file import path_of

FILTERED = "filtered"  # the word for a filtered network in the isolation of a record
_END_S = 2.0
_READY_S = 60.0  # the runtime may have to unpack an image


_NO_LISTENER = ("backend: process cannot build a sandbox here: a system call filter with a "
                "listener already holds this worker, and the kernel allows one; start it outside "
                "of that container, or use bwrap")


# why a directory cannot be made or entered, if that does not depend on the moment
_LASTING = frozenset({errno.EACCES, errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG,
                      errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS})


class Unbuildable(Exception):
    """The sandbox cannot be built; the text is one line that says why.

    Attributes:
        infeasible: whether no other sandbox of the same box and the same files can be built either.
    """

    def __init__(self, text: str, infeasible: bool = False) -> None:
        super().__init__(text)
        self.infeasible = infeasible


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
        changes: the folder with what a sandbox has changed in its writable image; None without such
            an image. With one the sandbox's user is 0, and `changes.users` says whether there are
            others.
        pause: the pause process, where there is one.
        own: the numbers of the processes of `pause` inside.
        nodes: names in `tmp` that are read-only mounts of the node's files.
        helper: the process outside by which a sandbox with a filtered or an open network reaches
            anything; else None.
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
    helper: ProxyProcess | OpenNetwork | None = None


def build(setup: Setup, home: str) -> SandboxIsolation:
    """Isolates this process for good.

    Raises:
        Unbuildable: it cannot be isolated as promised.
    """
    with ExitStack() as undo:
        built = _built(setup, home, undo)
        undo.pop_all()
    return built


def _built(setup: Setup, home: str, undo: ExitStack) -> SandboxIsolation:
    """Does the work of `build`. What has to be ended after a failure goes into `undo`: from within
    a sandbox this process does not find its children in /proc.
    """
    box = setup.box
    try:
        proxy = ProxyProcess(box.network, setup.read) if isinstance(box.network, tuple) else None
        stack = OpenNetwork(setup.read) if box.network == OPEN else None
        for helper in (proxy, stack):
            if helper is not None:
                undo.callback(helper.end)
        cgroupfs.join(setup.joins)
        if box.backend != "process" or box.trusted:
            os.close(MODES)
        if box.backend == "process":
            return _process(setup, home)
        if root_record.recorded(home) is not None and not setup.root:
            raise Unbuildable("image: the session's files are changes to an image; open it with "
                              "that image and with writable=True")
        built = (_rooted if setup.root else _held)(setup, home, stack, undo)
        if box.workdir:
            _make_workdir(box.workdir, box.writable)
        return built if proxy is None else _filtered(built, proxy)
    except NoOpenNetwork as error:
        process_tree.end_beneath(_END_S)
        raise Unbuildable(f"network: no open one can be built here ({error})") from None
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


def _filtered(built: SandboxIsolation, proxy: ProxyProcess) -> SandboxIsolation:
    """Returns the same sandbox with a proxy as its only way out. This process has already entered
    the sandbox's namespaces."""
    proxy.listen()
    return dataclasses.replace(built, name=f"{built.name}+{FILTERED}", helper=proxy)


def _process(setup: Setup, home: str) -> SandboxIsolation:
    isolation, box = "process", setup.box
    if not box.trusted:
        read = [*setup.read, visible_paths.PROC, path_of(home)]
        write = [scratch.home(home), scratch.tmp(home), *visible_paths.devices()]
        found = landlock.restrict(read, write, network=box.network is True)
        isolation += f"+landlock{found}"
        if seccomp.available():
            listener = seccomp.restrict(namespaced=False, network=box.network is True,
                                        sampled=setup.watch)
            modes.hand_over(MODES, listener)
            isolation += "+seccomp"
    return SandboxIsolation(isolation, DescendantProcesses(), scratch.home(home), scratch.tmp(home),
                            path_of(home))


def _held(setup: Setup, home: str, stack: OpenNetwork | None, undo: ExitStack) -> SandboxIsolation:
    box, runtime = setup.box, RUNTIMES[setup.box.backend]
    what = _container(setup, home)
    pause = PauseProcess(runtime.argv(what), runtime.env(os.environ), _READY_S)
    undo.callback(pause.end)
    if stack is not None:
        stack.attach(pause.inside)
    inner = IMAGE if box.image and box.backend == "bwrap" else ""
    join.enter(pause.inside, SESSION, inner, read_only=[*_nodes_devices(box), *runtime.read_only],
               sizes=runtime.unlimited(what), own_users=runtime.unshielded,
               bar_users=what.old_bwrap)
    _open_shm(what)
    isolation = box.backend
    if not box.trusted and seccomp.available():
        seccomp.restrict(namespaced=True, network=box.network is True, sampled=setup.watch)
        isolation += "+seccomp"
    isolation += f"+{OPEN}" if stack is not None else ""
    own = _own()
    return SandboxIsolation(isolation, NamespaceProcesses(own), SESSION, TMP, UNITS,
                            bool(box.image), None, pause, own, tmp_names(what), stack)


def _rooted(setup: Setup, home: str, stack: OpenNetwork | None,
            undo: ExitStack) -> SandboxIsolation:
    """Returns a sandbox with an image that it may write. Where its user 0 is the only user, the
    filter lets calls that change users and owners succeed without effect, in trusted code as well.
    """
    box, runtime = setup.box, RUNTIMES[setup.box.backend]
    if not seccomp.available():
        raise Unbuildable("image: this kernel cannot filter system calls, which a root that can be "
                          "written needs; pass writable=False")
    root = image_root.prepare(setup.root, box.image, home, _resolver(box, home),
                              UserMap(*setup.users) if setup.users else None)
    several = root.users.several
    what = _container(setup, home, root.folder)
    pause = PauseProcess(runtime.argv(what), runtime.env(os.environ), _READY_S, root.enter,
                         root.map_users)
    undo.callback(pause.end)
    if stack is not None:
        stack.attach(pause.inside)
    join.enter(pause.inside, SESSION, IMAGE,
               image_root.KEPT_OF_SEVERAL if several else image_root.KEPT,
               image_root.HELD_OF_SEVERAL if several else (), _nodes_devices(box),
               runtime.unlimited(what))
    _open_shm(what)
    os.umask(0o022)  # as root has it; the scratch directory is closed to others
    if several:
        os.setgroups([])  # the groups of the worker's user are no groups of the sandbox
    else:
        image_root.settle_in()
    seccomp.restrict(namespaced=True, network=box.network is True, sampled=setup.watch,
                     rootlike=True, trusted=box.trusted, several=several)
    isolation = "+".join((box.backend, root.way, *(["users"] if several else []),
                          *([] if box.trusted else ["seccomp"]),
                          *([OPEN] if stack is not None else [])))
    own = _own()
    return SandboxIsolation(isolation, NamespaceProcesses(own), SESSION, TMP, UNITS, True,
                            root, pause, own, helper=stack)


def _nodes_devices(box: SandboxSpec) -> list[str]:
    """Returns the devices that a sandbox must not change: those of the node, whose owner is user 0
    of the sandbox if the worker is root."""
    return devices(bool(box.image)) if os.geteuid() == 0 and box.backend == "bwrap" else []


def _open_shm(what: ContainerSpec) -> None:
    """Lets every user of a sandbox write /dev/shm where bwrap could not make it so."""
    if what.old_bwrap:
        os.chmod("/dev/shm", 0o1777)


def _make_workdir(path: str, writable: bool) -> None:
    """Makes the directory in which the programs of an image start, if it is missing."""
    here = os.getcwd()
    try:
        if not path.startswith("/"):
            raise OSError(errno.EINVAL, "it is not an absolute path")
        if writable:
            os.makedirs(path, 0o755, exist_ok=True)
        os.chdir(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Unbuildable(f"image: its working directory {path!r} cannot be entered ({why}); "
                          "correct WORKDIR of the image",
                          not isinstance(error, OSError) or error.errno in _LASTING) from None
    finally:
        os.chdir(here)


def _container(setup: Setup, home: str, root: str = "") -> ContainerSpec:
    box, files, resolver = setup.box, [(path_of(home), UNITS)], _resolver(setup.box, home)
    if not box.image:
        over = [(path, path) for path in etc.mounted(setup.read)]
        if resolver not in ("", RESOLV_CONF) and os.path.exists(setup.etc + "/resolv.conf"):
            over.append((resolver, RESOLV_CONF))
        files[:0] = [(setup.etc, "/etc"), *over]
    return ContainerSpec(home, box.image, box.network is True, etc.others(setup.read), files,
                         name=container_name(home), root=root, resolver=resolver,
                         old_bwrap=setup.old_bwrap, resets_sigchld=setup.resets_sigchld)


def _resolver(box: SandboxSpec, home: str) -> str:
    """Returns the file that is `/etc/resolv.conf` in the sandbox; empty for a sandbox without a
    network. For an open network the file is written beside the directories of the sandbox.
    """
    if box.network != OPEN:
        return RESOLV_CONF if leads_outside(box.network) else ""
    path = f"{home}/resolv.conf"
    with open(path, "w") as file:
        file.write(resolv_conf())
    os.chmod(path, 0o644)
    return path


def _own() -> frozenset[int]:
    """The pause process and its children, seen from inside, before anything else runs there."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
