"""Makes the root file system of an image from its unpacked layers.

The result is a plain folder whose files are hard links to those of the layers. So a layer that
several images share is on the disk and in the page cache once, and every backend can use the folder
as it is. A file is copied where the file system allows no more links.

Layers lie one on the other as an overlay shows them: a directory over a directory is both, anything
else replaces what is below it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from .confined_tree import FOLDER, remove_below
from .image_errors import ImageRefused, of_os_error
from .unpack_layer import LayerNotes

_NO_LINK = frozenset({errno.EMLINK, errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EACCES})


@dataclass(frozen=True)
class UnpackedLayer:
    """An unpacked layer: its folder, and its notes."""

    folder: str
    notes: LayerNotes


def merge_layers(layers: Sequence[UnpackedLayer], root: str) -> None:
    """Fills an empty folder with the layers, the lowest first.

    Raises:
        ImageRefused: a hard link of a layer has no target.
        ImageUnavailable: the disk is full or fails.
    """
    top = os.open(root, FOLDER)
    try:
        for layer in layers:
            for path in layer.notes.emptied:
                _empty(path, top)
            for path in layer.notes.removed:
                _remove(path, top)
            source = os.open(layer.folder, FOLDER)
            try:
                _lay(source, top, "", frozenset(layer.notes.implied))
            finally:
                os.close(source)
            for path, target in layer.notes.late_links:
                _late_link(path, target, top)
    except OSError as error:
        raise of_os_error(f"its layers cannot be merged at {error.filename!r}", error) from None
    finally:
        os.close(top)


def _lay(source: int, target: int, path: str, implied: frozenset[str]) -> None:
    """Lays one open directory of a layer over another one.

    Args:
        source: the directory of the layer.
        target: the other directory.
        path: what stands before the names in the directory: its path and a slash, or nothing.
        implied: the directories of the layer that have no entry of their own.
    """
    with os.scandir(source) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                _make_folder(name, target, None if f"{path}{name}" in implied else about)
                _lay_folder(name, source, target, f"{path}{name}/", implied)
                continue
            try:
                _link(name, source, name, target)
            except FileExistsError:
                _clear(name, target)
                _link(name, source, name, target)


def _make_folder(name: str, target: int, about: os.stat_result | None) -> None:
    """Makes a directory, with the owner and mode that `about` has. If it is None, a directory that
    is there stays as it is."""
    try:
        os.mkdir(name, 0o755, dir_fd=target)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=target).st_mode):
            os.unlink(name, dir_fd=target)
            os.mkdir(name, 0o755, dir_fd=target)
    if about is not None:
        _give(os.open(name, FOLDER, dir_fd=target), about)
        os.chmod(name, stat.S_IMODE(about.st_mode), dir_fd=target)


def _lay_folder(name: str, source: int, target: int, path: str, implied: frozenset[str]) -> None:
    below = os.open(name, FOLDER, dir_fd=source)
    try:
        there = os.open(name, FOLDER, dir_fd=target)
        try:
            _lay(below, there, path, implied)
        finally:
            os.close(there)
    finally:
        os.close(below)


def _give(fd: int, about: os.stat_result) -> None:
    """Gives an open file the owner of another file, and closes the file."""
    try:
        now = os.fstat(fd)
        if (now.st_uid, now.st_gid) != (about.st_uid, about.st_gid):
            os.fchown(fd, about.st_uid, about.st_gid)
    finally:
        os.close(fd)


def _link(name: str, source: int, new: str, target: int) -> None:
    try:
        os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        _copy(name, source, new, target)


def _copy(name: str, source: int, new: str, target: int) -> None:
    about = os.lstat(name, dir_fd=source)
    if stat.S_ISLNK(about.st_mode):
        return os.symlink(os.readlink(name, dir_fd=source), new, dir_fd=target)
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, os.O_RDONLY | flags, dir_fd=source), "rb") as old, \
            open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600, dir_fd=target),
                 "wb") as fresh:
        shutil.copyfileobj(old, fresh, 1 << 20)
        fresh.flush()
        _give(os.dup(fresh.fileno()), about)
        os.fchmod(fresh.fileno(), stat.S_IMODE(about.st_mode))
        os.utime(fresh.fileno(), ns=(about.st_atime_ns, about.st_mtime_ns))


def _clear(name: str, parent: int) -> None:
    if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        remove_below(name, parent)
    else:
        os.unlink(name, dir_fd=parent)


def _parent(path: str, top: int) -> tuple[int, str] | None:
    """Opens the directory above a path, without following links; None if there is none."""
    *above, name = path.split("/")
    here = os.dup(top)
    for part in above:
        try:
            there = os.open(part, FOLDER, dir_fd=here)
        except OSError as error:
            os.close(here)
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        os.close(here)
        here = there
    return here, name


def _remove(path: str, top: int) -> None:
    found = _parent(path, top)
    if found is None:
        return
    try:
        _clear(found[1], found[0])
    except FileNotFoundError:
        pass  # a whiteout of what no lower layer has is legal
    finally:
        os.close(found[0])


def _empty(path: str, top: int) -> None:
    found = _parent(f"{path}/." if path else ".", top)
    if found is None:
        return
    try:
        for name in os.listdir(found[0]):
            _clear(name, found[0])
    finally:
        os.close(found[0])


def _late_link(path: str, target: str, top: int) -> None:
    source, new = _parent(target, top), _parent(path, top)
    try:
        if source is None or new is None:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        if stat.S_ISDIR(os.lstat(source[1], dir_fd=source[0]).st_mode):
            raise ImageRefused(f"image: a layer has {path!r} as a hard link to the directory "
                               f"{target!r}")
        try:
            _clear(new[1], new[0])
        except FileNotFoundError:
            pass
        _link(source[1], source[0], new[1], new[0])
    except FileNotFoundError:
        raise ImageRefused(f"image: a layer has {path!r} as a hard link to {target!r}, which no "
                           "layer has") from None
    finally:
        for found in (source, new):
            if found is not None:
                os.close(found[0])
