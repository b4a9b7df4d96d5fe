"""Gives a session a root directory that it can write, over an image that stays as it is.

Many sessions share one unpacked image. What a session changes goes into a folder `changes` of its
own scratch directory. There are three ways, and a worker finds out which of them work on its node:

- `overlay`: the kernel's overlayfs, mounted in a user namespace of the sandbox's own. It needs
  Linux 5.11, and an image whose files belong to this user and group.
- `fuse`: fuse-overlayfs does the same in a process. It needs /dev/fuse.
- `copy`: `changes` is a copy of the image, by reflink where the file system can.

`prepare` runs in a sandbox's init, and `enter` in the process that becomes the container runtime.
What an image holds is not trusted. No name in it is followed: the places that are mounted or
written later are opened one part at a time, and replaced where they are links or files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from ..files import scratch

WAYS = ("overlay", "fuse", "copy")
SESSION, UNITS = "session", "session.cpus"  # in the root of a sandbox
# CAP_DAC_OVERRIDE, CAP_FOWNER and CAP_NET_BIND_SERVICE: root reads and writes every file of its
# image, whatever the mode, and a server may use a port below 1024 of the sandbox's own network
KEPT = frozenset({1, 3, 10})
_FUSE = "fuse-overlayfs"
_FOLDERS = ("proc", "dev", "tmp", SESSION)
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_NOSUID, _NODEV = 2, 4
_PR_SET_DUMPABLE = 4
_ROOTS_IDS = 65536  # what a worker that is root maps, so that it can use images of several users
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APT = "/etc/apt/apt.conf.d"
_NETWORK_FILES = ("resolv.conf", "hosts")
_FILE_MAX = 1 << 20
_EXAMINED = 64  # entries of a folder whose owner is looked at

_libc = ctypes.CDLL(None, use_errno=True)


class Unusable(Exception):
    """The image cannot be a root that is written; the text is one line that says why."""


class _Record(msgspec.Struct):
    """What `changes` is, kept in the scratch directory for the next init, a fork and a move."""

    way: str
    image: str
    image_mib: int = 0  # of a copy: what it had when it was made


@dataclass(frozen=True)
class ImageRoot:
    """A root that a session can write.

    Attributes:
        way: one of `WAYS`.
        home: the scratch directory.
        image: the image's folder.
        network: whether the sandbox shares the node's network, and so needs its resolver.
        changes_fd: open on the folder that holds what the session changed.
        image_mib: how much of `changes` is the image itself, in MiB.
    """

    way: str
    home: str
    image: str
    network: bool
    changes_fd: int
    image_mib: int = 0

    @property
    def folder(self) -> str:
        """Where the root is after `enter`, in the mount namespace of the process that called it."""
        return (scratch.changes if self.way == "copy" else scratch.root)(self.home)

    def enter(self) -> None:
        """Takes this process into user and mount namespaces of its own, in which it is user 0, and
        mounts the root at `folder`.

        Raises:
            OSError: the kernel refuses.
            Unusable: the image cannot be mounted.
        """
        os.umask(0o022)
        _become_root()
        if self.way == "overlay":
            self._mount_overlay()
        elif self.way == "fuse":
            self._mount_fuse()
        root = os.open(self.folder, _FOLDER)
        try:
            _furnish(root)
            if self.network:
                _copy_network_files(root)
        finally:
            os.close(root)
        # no nested namespaces, as with bwrap's --disable-userns
        _write("/proc/sys/user/max_user_namespaces", "0")

    def _mount_overlay(self) -> None:
        # opened here: an overlay takes no folder of another mount namespace
        image = os.open(self.image, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.chdir(self.home)  # commands see the options in /proc/mounts, so no path is in them
        names = (os.path.basename(each) for each in (
            scratch.changes(self.home), scratch.work(self.home)))
        layers = "lowerdir=/proc/self/fd/{},upperdir={},workdir={},userxattr".format(
            image, *names)
        # volatile (5.10): a session that its node loses is lost anyway, so nothing needs fsync
        for options in (f"{layers},volatile", layers):
            code = _mount("overlay", scratch.root(self.home), "overlay", _NOSUID | _NODEV, options)
            if not code:
                return
        raise OSError(code, f"overlay: {os.strerror(code)}")

    def _mount_fuse(self) -> None:
        image = os.open(self.image, os.O_PATH | os.O_DIRECTORY)
        options = (f"lowerdir=/proc/self/fd/{image},upperdir={scratch.changes(self.home)},"
                   f"workdir={scratch.work(self.home)},squash_to_root,nosuid,nodev")
        with _waiting():
            done = subprocess.run([_FUSE, "-o", options, scratch.root(self.home)],
                                  stdin=subprocess.DEVNULL, capture_output=True, check=False,
                                  pass_fds=(image,))
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise Unusable(f"{_FUSE}: {said[-1] if said else done.returncode}")


def missing(way: str) -> str:
    """Why a way cannot work here, as far as it is known without trying; empty when it may."""
    if way == "fuse" and not shutil.which(_FUSE):
        return f"{_FUSE} is not installed"
    return ""


def prepare(way: str, image: str, home: str, network: bool) -> ImageRoot:
    """Makes the folders in the scratch directory `home` for a root over `image`, or takes over
    those of a dead init, an origin or another node.

    Args:
        way: the best way of this node, one of `WAYS`. An image whose files belong to several users
            or groups is copied instead, if this user may not map them.
        image: the image's folder.
        home: the scratch directory.
        network: see `ImageRoot`.

    Raises:
        Unusable: the image cannot be used, or the files that are there are of another image.
        OSError: `image` is not a folder that can be opened, or the disk is full.
    """
    folder = os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        record = recorded(home) or _made(way, image, folder, home)
    finally:
        os.close(folder)
    if record.image != image:
        raise Unusable(f"image: its files are changes to {record.image!r}; name that image")
    if record.way not in ("copy", way):
        raise Unusable(f"image: the session's files are a layer of {record.way}, and this node has "
                       f"only {way}")
    scratch.remove(scratch.work(home))  # what a mount that is gone left there
    for each in (scratch.work(home), scratch.root(home)):
        with suppress(FileExistsError):
            os.mkdir(each, 0o755)
    return ImageRoot(record.way, home, image, network, os.open(scratch.changes(home), _FOLDER),
                     record.image_mib)


def _made(way: str, image: str, folder: int, home: str) -> _Record:
    """Makes `changes`, and notes what it is."""
    if way != "copy" and not _is_own(folder):
        way = "copy"
    os.mkdir(scratch.changes(home))
    os.chmod(scratch.changes(home), 0o755)  # the mode of the root, whatever the umask
    record = _Record(way, image)
    if way == "copy":
        record.image_mib = _copy(folder, scratch.changes(home))
    with open(scratch.root_record(home), "wb") as file:
        file.write(msgspec.json.encode(record))
    return record


def recorded(home: str) -> _Record | None:
    """What the root of a scratch directory is; None when it has none."""
    try:
        with open(scratch.root_record(home), "rb") as file:
            return msgspec.json.decode(file.read(), type=_Record)
    except FileNotFoundError:
        return None


def settle_in() -> None:
    """Does in the sandbox, as its root, what programs need where user 0 is the only user: apt does
    not change to a user of its own.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):  # an image without apt, or with this file
        fd = os.open(f"{_APT}/00tangram", flags, 0o644)
        with open(fd, "w") as file:
            file.write('APT::Sandbox::User "root";\n')


# ---- the image ----


def _is_own(folder: int) -> bool:
    """Whether the files of an image seem to belong to this user and group, which overlays need to
    copy one up. A part of the upper two levels is examined: a whole image would take too long.
    """
    def mapped(about: os.stat_result) -> bool:
        if os.geteuid() == 0:
            return max(about.st_uid, about.st_gid) < _ROOTS_IDS
        return (about.st_uid, about.st_gid) == (os.geteuid(), os.getegid())

    if not mapped(os.fstat(folder)):
        return False
    for name in os.listdir(folder):
        about = os.lstat(name, dir_fd=folder)
        if not mapped(about):
            return False
        if stat.S_ISDIR(about.st_mode):
            with suppress(OSError):  # closed, or gone
                below = os.open(name, _FOLDER, dir_fd=folder)
                try:
                    some = os.listdir(below)[:_EXAMINED]
                    if not all(mapped(os.lstat(each, dir_fd=below)) for each in some):
                        return False
                finally:
                    os.close(below)
    return True


def _copy(folder: int, target: str) -> int:
    """Copies an image into an empty folder; returns its size in MiB."""
    command = (*scratch.COPY, "--no-preserve=ownership", f"/proc/self/fd/{folder}/.", target)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False,
                          pass_fds=(folder,))
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unusable(f"image: it cannot be copied ({said[0] if said else 'cp failed'})")
    size = subprocess.run(["du", "-sk", target], capture_output=True, text=True, check=False)
    return int(size.stdout.split()[0]) >> 10 if size.stdout else 0


# ---- in the process that becomes the runtime ----


def _become_root() -> None:
    """Makes a user namespace in which this process is user 0, and a mount namespace in it."""
    uid, gid = os.geteuid(), os.getegid()
    span = _ROOTS_IDS if uid == gid == 0 else 1
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else root owns the files that are written here
    maps = {"uid_map": f"0 {uid} {span}", "gid_map": f"0 {gid} {span}"}
    with _waiting():
        ask = _mapper(os.getpid(), maps) if span > 1 else None
        if _libc.unshare(_NEWUSER | _NEWNS) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"user namespace: {os.strerror(code)}")
        _write("/proc/self/setgroups", "deny")
        if ask is not None:
            return ask()
    for name, text in maps.items():
        _write(f"/proc/self/{name}", text)


def _mapper(pid: int, maps: Mapping[str, str]) -> Callable[[], None]:
    """Forks a process that stays root of the machine, because only such a one may map more than one
    user. Returns the call that makes it write the maps of `pid` and waits for it.
    """
    into, out = os.pipe()
    helper = os.fork()
    if helper == 0:
        status = 1
        with suppress(OSError):
            os.close(out)
            if os.read(into, 1):
                for name, text in maps.items():
                    _write(f"/proc/{pid}/{name}", text)
                status = 0
        os._exit(status)
    os.close(into)

    def ask() -> None:
        os.write(out, b"x")
        os.close(out)
        if os.waitpid(helper, 0)[1]:
            raise OSError(errno.EPERM, "user namespace: its users cannot be mapped")

    return ask


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> int:
    """Mounts; returns the error's number, or 0."""
    done = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode())
    return ctypes.get_errno() if done else 0


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


@contextmanager
def _waiting() -> Iterator[None]:
    """Lets this process wait for its children, although it ignores SIGCHLD for what it becomes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _furnish(root: int) -> None:
    """Makes the places where the runtime mounts something. A link or a file that the image has
    there is replaced, because the runtime would follow it.
    """
    for name in _FOLDERS:
        if not _is(stat.S_ISDIR, name, root):
            _make_room(name, root)
            os.mkdir(name, 0o755, dir_fd=root)
    if not _is(stat.S_ISREG, UNITS, root):
        _make_room(UNITS, root)
        os.close(os.open(UNITS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644,
                         dir_fd=root))


def _is(kind: object, name: str, folder: int) -> bool:
    try:
        return bool(kind(os.lstat(name, dir_fd=folder).st_mode))  # type: ignore[operator]
    except FileNotFoundError:
        return False


def _make_room(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        raise Unusable(f"image: /{name} is a folder, where a file of the sandbox belongs; remove "
                       "it from the image") from None


def _copy_network_files(root: int) -> None:
    """Gives a sandbox that shares the node's network the node's resolver. An image whose /etc is
    not a folder goes without.
    """
    try:
        etc = os.open("etc", _FOLDER, dir_fd=root)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return
        raise
    try:
        for name in _NETWORK_FILES:
            with suppress(OSError):  # the node has none, or a folder stands there
                with open(f"/etc/{name}", "rb") as file:
                    data = file.read(_FILE_MAX)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=etc)
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644,
                             dir_fd=etc)
                with open(fd, "wb") as copy:
                    copy.write(data)
    finally:
        os.close(etc)
