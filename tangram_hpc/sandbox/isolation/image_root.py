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
import stat
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from .. import user_namespace
from ..files import root_record, scratch
from ..files.root_record import RootRecord
from ..run_program import run_program
from ..user_namespace import OutsideMaps, UserMap
from . import hosts

WAYS = ("overlay", "fuse", "copy")
SESSION, UNITS = "session", "session.cpus"  # in the root of a sandbox
# CAP_DAC_OVERRIDE, CAP_FOWNER and CAP_NET_BIND_SERVICE: root reads and writes every file of its
# image, whatever the mode, and a server may use a port below 1024 of the sandbox's own network
KEPT = frozenset({1, 3, 10})
# CAP_CHOWN, CAP_FSETID, CAP_KILL, CAP_SETGID and CAP_SETUID: root needs these to act on other users
KEPT_OF_SEVERAL = KEPT | {0, 4, 5, 6, 7}
# CAP_SYS_PTRACE and CAP_SYS_RESOURCE: the init measures and limits the processes of all users. It
# keeps these to itself.
HELD_OF_SEVERAL = frozenset({19, 24})
_FUSE = "fuse-overlayfs"
_FOLDERS = ("proc", "dev", "tmp", SESSION)
_NEWNS = 0x00020000
_NOSUID, _NODEV = 2, 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APT = "/etc/apt/apt.conf.d"
_FILE_MAX = 1 << 20
_EXAMINED = 64  # entries of a folder whose owner is looked at

_libc = ctypes.CDLL(None, use_errno=True)


class Unusable(Exception):
    """The image cannot be a root that is written; the text is one line that says why."""


@dataclass(frozen=True)
class ImageRoot:
    """A root that a session can write.

    Attributes:
        way: one of `WAYS`.
        home: the scratch directory.
        image: the image's folder.
        resolver: the file of the node that is `/etc/resolv.conf` inside; empty where the sandbox
            has no way out.
        changes_fd: open on the folder that holds what the session changed.
        users: which users the sandbox has.
        maps: the pipes by which `enter` asks for `map_users`; None if user 0 is the only user.
        image_mib: where `changes` is a copy of the image, the size of the image in MiB; else 0.
        layers: folders of snapshots between the image and the changes, the uppermost first.
    """

    way: str
    home: str
    image: str
    resolver: str
    changes_fd: int
    users: UserMap
    maps: OutsideMaps | None = None
    image_mib: int = 0
    layers: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Where the root is after `enter`, in the mount namespace of the process that called it."""
        return (scratch.changes if self.way == "copy" else scratch.root)(self.home)

    def enter(self) -> None:
        """Takes this process into user and mount namespaces of its own, in which it is user 0, and
        mounts the root at `folder`. Its parent must call `map_users`.

        Raises:
            OSError: the kernel refuses.
            Unusable: the image cannot be mounted.
        """
        os.umask(0o022)
        user_namespace.enter(self.users, _NEWNS, self.maps)
        if self.way == "overlay":
            self._mount_overlay()
        elif self.way == "fuse":
            self._mount_fuse()
        root = os.open(self.folder, _FOLDER)
        try:
            _furnish(root)
            _write_network_files(root, self.resolver)
        finally:
            os.close(root)
        # no nested namespaces, as with bwrap's --disable-userns
        user_namespace.write_setting("/proc/sys/user/max_user_namespaces", "0")

    def map_users(self, pid: int) -> None:
        """Maps the users of process `pid`, a child that calls `enter`, which cannot do so itself;
        returns when that is done or the child has ended."""
        if self.maps is not None:
            self.maps.write(pid)

    def _mount_overlay(self) -> None:
        lower, _ = self._lower(os.O_CLOEXEC)
        os.chdir(self.home)  # commands see the options in /proc/mounts, so no path is in them
        names = (os.path.basename(each) for each in (
            scratch.changes(self.home), scratch.work(self.home)))
        layers = "lowerdir={},upperdir={},workdir={},userxattr".format(lower, *names)
        # volatile (5.10): a session that its node loses is lost anyway, so nothing needs fsync
        for options in (f"{layers},volatile", layers):
            code = _mount("overlay", scratch.root(self.home), "overlay", _NOSUID | _NODEV, options)
            if not code:
                return
        raise OSError(code, f"overlay: {os.strerror(code)}")

    def _lower(self, flags: int) -> tuple[str, tuple[int, ...]]:
        """Opens the folders below the changes, because an overlay takes no folder of another mount
        namespace. Returns the folders in the form of the mount option, the uppermost first, and
        their descriptors.
        """
        fds = tuple(os.open(each, os.O_PATH | os.O_DIRECTORY | flags)
                    for each in (*self.layers, self.image))
        return ":".join(f"/proc/self/fd/{fd}" for fd in fds), fds

    def _mount_fuse(self) -> None:
        lower, fds = self._lower(0)
        options = (f"lowerdir={lower},upperdir={scratch.changes(self.home)},"
                   f"workdir={scratch.work(self.home)},nosuid,nodev"
                   f"{'' if self.users.several else ',squash_to_root'}")
        with user_namespace.waiting():
            done = run_program([_FUSE, "-o", options, scratch.root(self.home)], pass_fds=fds)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise Unusable(f"{_FUSE}: {said[-1] if said else done.returncode}")


def missing(way: str) -> str:
    """Why a way cannot work here, as far as it is known without trying; empty when it may."""
    if way == "fuse" and not shutil.which(_FUSE):
        return f"{_FUSE} is not installed"
    return ""


def prepare(way: str, image: str, home: str, resolver: str, users: UserMap | None = None
            ) -> ImageRoot:
    """Makes the folders in the scratch directory `home` for a root over `image`. If the directory
    holds such folders already, of a dead init, an origin or another node, they are taken over.

    Args:
        way: the best way of this node, one of `WAYS`. An image whose files belong to several users
            or groups is copied instead, if this user may not map them.
        image: the image's folder.
        home: the scratch directory.
        resolver: see `ImageRoot`.
        users: which users the sandbox has; None for user 0 alone. If the scratch directory has
            files of an earlier sandbox, the users of that sandbox are used instead.

    Raises:
        Unusable: the image cannot be used, or the files that are there are of another image.
        OSError: `image` is not a folder that can be opened, or the disk is full.
    """
    folder = os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if scratch.users_of(home) is None:
            scratch.note_users(home, users or user_namespace.own())
            if users is not None and users.several:
                scratch.open_to_users(home)
        record = root_record.recorded(home) or _made(way, image, folder, home)
    finally:
        os.close(folder)
    if record.image != image:
        raise Unusable(f"image: the session's files are changes to {record.image!r}; name that "
                       "image")
    if record.way not in ("copy", way):
        raise Unusable(f"image: the session's files are a layer of {record.way}, and this node has "
                       f"only {way}")
    scratch.remove(scratch.work(home))  # an earlier mount leaves files there
    for each in (scratch.work(home), scratch.root(home)):
        with suppress(FileExistsError):
            os.mkdir(each, 0o755)
    users = scratch.users_of(home) or user_namespace.own()
    return ImageRoot(record.way, home, image, resolver, os.open(scratch.changes(home), _FOLDER),
                     users, OutsideMaps(users) if users.several else None, record.image_mib,
                     record.layers)


def _made(way: str, image: str, folder: int, home: str) -> RootRecord:
    """Makes `changes`, and notes what it is."""
    users = scratch.users_of(home) or user_namespace.own()
    if way != "copy" and not _is_own(folder, users):
        way = "copy"
    os.mkdir(scratch.changes(home))
    os.chmod(scratch.changes(home), 0o755)  # the mode of the root, whatever the umask
    copied_mib = _copy(folder, scratch.changes(home), users) if way == "copy" else 0
    record = RootRecord(way, image, copied_mib)
    root_record.keep(home, record)
    return record


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


def _is_own(folder: int, users: UserMap) -> bool:
    """Returns whether the files of an image seem to belong to users and groups of the sandbox. An
    overlay cannot change a file of any other owner. Only a part of the upper two levels is
    examined, because a whole image would take too long."""
    uids, gids = users.outside()
    known: dict[tuple[int, int], bool] = {}

    def mapped(about: os.stat_result) -> bool:
        owner = about.st_uid, about.st_gid
        if owner not in known:
            known[owner] = (any(owner[0] in each for each in uids)
                            and any(owner[1] in each for each in gids))
        return known[owner]

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
                    with os.scandir(below) as entries:
                        if not all(mapped(each.stat(follow_symlinks=False))
                                   for each in islice(entries, _EXAMINED)):
                            return False
                finally:
                    os.close(below)
    return True


def _copy(folder: int, target: str, users: UserMap) -> int:
    """Copies an image into an empty folder; returns its size in MiB. If the image has files of
    owners that are no users of the sandbox, all files of the copy belong to user 0.
    """
    owners = () if users.several and _is_own(folder, users) else ("--no-preserve=ownership",)
    command = (*user_namespace.prefix(users), *scratch.COPY, *owners,
               f"/proc/self/fd/{folder}/.", target)
    done = run_program(command, pass_fds=(folder,))
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unusable(f"image: it cannot be copied ({said[0] if said else 'cp failed'})")
    size = run_program(["du", "-sk", target])
    return int(size.stdout.split()[0]) >> 10 if size.stdout else 0


# ---- in the process that becomes the runtime ----


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> int:
    """Mounts; returns the error's number, or 0."""
    done = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode())
    return ctypes.get_errno() if done else 0


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


def _write_network_files(root: int, resolver: str) -> None:
    """Gives a sandbox with a network its `resolv.conf` and the node's `hosts`, and completes the
    `hosts` of every sandbox. An image whose /etc is not a folder gets neither.
    """
    try:
        etc = os.open("etc", _FOLDER, dir_fd=root)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return
        raise
    try:
        if resolver:
            with suppress(OSError):  # the node has none, or a folder stands there
                _put("resolv.conf", _content(resolver), etc)
        with suppress(OSError):  # a link, which is not followed, or a folder
            text = b""
            with suppress(FileNotFoundError):
                text = _content("/etc/hosts") if resolver else _content("hosts", etc)
            complete = hosts.completed(text)
            if resolver or complete != text:
                _put("hosts", complete, etc)
    finally:
        os.close(etc)


def _content(path: str, folder: int | None = None) -> bytes:
    """Returns the beginning of a file. A link in `folder` is not followed."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
    fd = os.open(path, flags | (0 if folder is None else os.O_NOFOLLOW), dir_fd=folder)
    with open(fd, "rb") as file:
        return file.read(_FILE_MAX)


def _put(name: str, data: bytes, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    with open(fd, "wb") as file:
        file.write(data)
