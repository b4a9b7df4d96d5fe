"""Makes the root file system of an image from its unpacked layers.

The result is a plain folder whose files are hard links to those of the layers. So a layer that
several images share is on the disk and in the page cache once, and every backend can use the folder
as it is. A file is copied where the file system allows no more links.

Layers lie one on the other as an overlay shows them: a directory over a directory is both, anything
else replaces what is below it. A directory that a layer has without an entry of its own replaces no
link: `bin/tool` of a layer goes through the link `bin -> usr/bin` of a lower one, and its whiteout
`bin/.wh.tool` removes `usr/bin/tool`, as with other programs that unpack images.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from .confined_tree import FOLDER, ConfinedTree, parts_of, remove_below
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
        ImageRefused: a hard link of a layer has no target, or a path leads through a file or a
            circle of links.
        ImageUnavailable: the disk is full or fails.
    """
    top, tree = os.open(root, FOLDER), ConfinedTree(root)
    try:
        for layer in layers:
            with _targets(layer, os.path.dirname(root), tree) as kept:
                for path in layer.notes.emptied:
                    _empty(path, layer, top, tree)
                for path in layer.notes.removed:
                    _remove(path, layer, top, tree)
                source = os.open(layer.folder, FOLDER)
                try:
                    _lay(source, top, "", frozenset(layer.notes.implied), tree)
                finally:
                    os.close(source)
                for path, target in layer.notes.late_links:
                    _late_link(path, target, kept, tree)
        tree.set_times()
    except OSError as error:
        raise of_os_error(f"its layers cannot be merged at {error.filename!r}", error) from None
    finally:
        tree.close()
        os.close(top)


def _lay(source: int, target: int, path: str, implied: frozenset[str], tree: ConfinedTree) -> None:
    """Lays one open directory of a layer over another one.

    Args:
        source: the directory of the layer.
        target: the other directory.
        path: what stands before the names in the directory: its path and a slash, or nothing.
        implied: the directories of the layer that have no entry of their own.
        tree: the root, for links that are followed.
    """
    with os.scandir(source) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                below = os.open(name, FOLDER, dir_fd=source)
                try:
                    if f"{path}{name}" in implied:
                        there = _implied_folder(name, target, f"{path}{name}", tree)
                    else:
                        about = os.fstat(below)
                        there = _make_folder(name, target, about)
                        tree.times[f"{path}{name}"] = about.st_mtime_ns
                    try:
                        _lay(below, there, f"{path}{name}/", implied, tree)
                    finally:
                        os.close(there)
                finally:
                    os.close(below)
                continue
            try:
                _link(name, source, name, target)
            except FileExistsError:
                _clear(name, target)
                _link(name, source, name, target)


def _make_folder(name: str, target: int, about: os.stat_result | None) -> int:
    """Makes a directory, with the owner and mode that `about` has, and opens it. If `about` is
    None, a directory that is there stays as it is."""
    try:
        os.mkdir(name, 0o755, dir_fd=target)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=target).st_mode):
            os.unlink(name, dir_fd=target)
            os.mkdir(name, 0o755, dir_fd=target)
    if about is not None:
        _give(os.open(name, FOLDER, dir_fd=target), about)
        os.chmod(name, stat.S_IMODE(about.st_mode), dir_fd=target)
    return os.open(name, FOLDER, dir_fd=target)


def _implied_folder(name: str, target: int, path: str, tree: ConfinedTree) -> int:
    """Opens where the files of a directory without an entry of its own go: what is there if it is a
    directory or a link, else a new directory."""
    try:
        if stat.S_ISLNK(os.lstat(name, dir_fd=target).st_mode):
            return _resolved(path, tree)
    except FileNotFoundError:
        pass
    return _make_folder(name, target, None)


def _resolved(path: str, tree: ConfinedTree) -> int:
    """Opens a directory of the root; links are followed within the root. A missing one is made."""
    tree.forget()  # a directory may have become something else since
    return os.dup(tree.folder(parts_of(path)))


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


def _parent(path: str, layer: UnpackedLayer, top: int, tree: ConfinedTree
            ) -> tuple[int, str] | None:
    """Opens the directory above the path of a whiteout; None if there is none. A link of a lower
    layer is followed, if the layer of the whiteout does not replace the link."""
    *above, name = path.split("/")
    here = os.dup(top)
    for depth, part in enumerate(above, 1):
        try:
            there: int | None = os.open(part, FOLDER, dir_fd=here)
        except FileNotFoundError:
            there = None
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            there = _behind("/".join(above[:depth]), layer, tree)
        finally:
            os.close(here)
        if there is None:
            return None
        here = there
    return here, name


def _behind(path: str, layer: UnpackedLayer, tree: ConfinedTree) -> int | None:
    """Opens the directory to which a link leads; None if the layer has an entry in its place, or if
    it leads to no directory of the image."""
    if path not in layer.notes.implied and os.path.lexists(f"{layer.folder}/{path}"):
        return None
    tree.forget()
    with suppress(FileNotFoundError, ImageRefused):
        return os.dup(tree.folder(parts_of(path), make=False))
    return None


def _remove(path: str, layer: UnpackedLayer, top: int, tree: ConfinedTree) -> None:
    found = _parent(path, layer, top, tree)
    if found is None:
        return
    try:
        _clear(found[1], found[0])
    except FileNotFoundError:
        pass  # a whiteout of what no lower layer has is legal
    finally:
        os.close(found[0])


def _empty(path: str, layer: UnpackedLayer, top: int, tree: ConfinedTree) -> None:
    found = _parent(f"{path}/." if path else ".", layer, top, tree)
    if found is None:
        return
    try:
        for name in os.listdir(found[0]):
            _clear(name, found[0])
    finally:
        os.close(found[0])


@contextmanager
def _targets(layer: UnpackedLayer, beside: str, tree: ConfinedTree) -> Iterator[dict[str, str]]:
    """Keeps what the late links of a layer lead to, which the layer may replace or remove; gives
    the path of each target. They are gone at the end."""
    if not layer.notes.late_links:
        yield {}
        return
    kept: dict[str, str] = {}
    with TemporaryDirectory(dir=beside) as folder:
        tree.forget()
        for _, target in layer.notes.late_links:
            above, _, name = target.rpartition("/")
            with suppress(FileNotFoundError, ImageRefused):
                parent = tree.folder(parts_of(above), make=False)
                if target not in kept and not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                    aside = f"{folder}/{len(kept)}"
                    _link(name, parent, aside, parent)
                    kept[target] = aside
        yield kept


def _late_link(path: str, target: str, kept: Mapping[str, str], tree: ConfinedTree) -> None:
    (from_folder, _, source), (into_folder, _, new) = target.rpartition("/"), path.rpartition("/")
    with ExitStack() as opened:
        try:
            into_fd = from_fd = _resolved(into_folder, tree)
            opened.callback(os.close, into_fd)
            if target in kept:
                source = kept[target]
            else:
                from_fd = _resolved(from_folder, tree)
                opened.callback(os.close, from_fd)
            if stat.S_ISDIR(os.lstat(source, dir_fd=from_fd).st_mode):
                raise ImageRefused(f"image: a layer has {path!r} as a hard link to the directory "
                                   f"{target!r}")
            with suppress(FileNotFoundError):
                _clear(new, into_fd)
            _link(source, from_fd, new, into_fd)
        except FileNotFoundError:
            raise ImageRefused(f"image: a layer has {path!r} as a hard link to {target!r}, which "
                               "no layer has") from None
