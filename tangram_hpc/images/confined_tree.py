"""Makes files below one folder and never outside of it, whatever names and links an archive holds.

The archives come from strangers. So every directory of a path is opened by itself, without
following a link. A link inside the tree is followed by hand, as a program that runs
with this tree as its root would follow it: an absolute target begins at the root of the tree, and
`..` at the root stays there.

Invariant: nothing outside of the folder is ever opened for writing, made, changed or removed.
Nobody else may change the folder meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from ..sandbox.files import scratch
from .image_errors import ImageRefused
from .image_limits import DEPTH_MAX, NAME_MAX

_LINKS_MAX = 40
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Parts = tuple[str, ...]


def parts_of(name: str) -> Parts:
    """Returns the parts of the name of an entry; none for the root itself. An absolute name, as
    buildpacks write it, begins at the root of the image.

    Raises:
        ImageRefused: the name climbs, or is too long or too deep.
    """
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise ImageRefused(f"image: a layer has the name {shown(name)}, which leads out of the "
                           "image")
    if "\0" in name or len(os.fsencode(name)) > NAME_MAX:
        raise ImageRefused(f"image: a layer has the name {shown(name)}, which is not a path")
    if len(parts) > DEPTH_MAX:
        raise ImageRefused(f"image: a layer has a path of {len(parts)} directories; at most "
                           f"{DEPTH_MAX} are allowed")
    return parts


def shown(name: str) -> str:
    """Returns a name as it can stand in a message: printable, quoted and short."""
    safe = name.encode(errors="backslashreplace").decode(errors="replace")
    return repr(safe if len(safe) <= 120 else f"{safe[:117]}...")


class ConfinedTree:
    """A folder that is filled.

    Args:
        root: the folder, which exists.

    Attributes:
        implied: paths of directories that were only made because something in them was made. A
            caller that makes one of them itself removes it from here.
        times: the times of change, in ns, that `set_times` gives directories, by their paths.
    """

    def __init__(self, root: str) -> None:
        self.implied: set[Parts] = set()
        self.times: dict[str, int] = {}
        self._root = os.open(root, FOLDER)
        # the directory that was used last: its path as asked for, its path without links
        self._last: tuple[Parts, int, Parts] | None = None

    def close(self) -> None:
        """Closes what is open."""
        self.forget()
        os.close(self._root)

    def set_times(self) -> None:
        """Gives directories the times of `times`, when nothing more is made in them. Paths that
        lead to no directory any more are passed over."""
        self.forget()
        for path, when in self.times.items():
            above, _, name = path.rpartition("/")
            with suppress(FileNotFoundError, NotADirectoryError, ImageRefused):
                fd = _opened(name, self.folder(parts_of(above), make=False))
                try:
                    os.utime(fd, ns=(0, when))
                finally:
                    os.close(fd)

    def forget(self) -> None:
        """Says that a directory may have become something else."""
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    def folder(self, parts: Parts, make: bool = True) -> int:
        """Returns a descriptor of a directory, valid until the next call.

        Args:
            parts: its path.
            make: whether missing directories are made.

        Raises:
            ImageRefused: the path leads through a file or a circle of links.
            FileNotFoundError: it does not exist, and `make` is False.
        """
        if not parts:
            return self._root
        if self._last is None or self._last[0] != parts:
            self.forget()
            self._last = parts, *self._walk(parts, make)
        return self._last[1]

    def real(self, parts: Parts) -> Parts:
        """Returns the path of a directory that exists, without links."""
        self.folder(parts, make=False)
        return self._last[2] if self._last is not None and parts else ()

    def _walk(self, parts: Parts, make: bool) -> tuple[int, Parts]:
        held, names, links = [os.dup(self._root)], list[str](), 0
        todo = list(reversed(parts))
        try:
            while todo:
                name = todo.pop()
                if name == "..":
                    if names:
                        os.close(held.pop())
                        names.pop()
                    continue
                try:
                    held.append(self._enter(name, held[-1], make, names))
                    names.append(name)
                except NotADirectoryError:
                    target = _link(name, held[-1])
                    links += 1
                    if target is None or links > _LINKS_MAX:
                        what = "a file" if target is None else "a circle of links"
                        raise ImageRefused(f"image: {shown('/'.join(parts))} leads through {what} "
                                           f"({shown(name)})") from None
                    if target.startswith("/"):
                        names.clear()
                        while len(held) > 1:
                            os.close(held.pop())
                    todo += [p for p in reversed(target.split("/")) if p not in ("", ".")]
                if len(held) > DEPTH_MAX + 1 or len(todo) > NAME_MAX:
                    raise ImageRefused(f"image: {shown('/'.join(parts))} leads through more than "
                                       f"{DEPTH_MAX} directories")
            return held.pop(), tuple(names)
        finally:
            for fd in held:
                os.close(fd)

    def _enter(self, name: str, parent: int, make: bool, above: list[str]) -> int:
        try:
            return _opened(name, parent)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, 0o755, dir_fd=parent)
            self.implied.add((*above, name))
            return _opened(name, parent)

    def clear(self, parent: int, name: str) -> None:
        """Removes what is at `name` in an open directory, with all below it."""
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            remove_below(name, parent)
        # it may have been a link or a directory on the way to the directory that was used last
        self.forget_but(parent)

    def forget_but(self, parent: int) -> None:
        """Like `forget`, but leaves a descriptor open that is in use, by its path without links:
        the path that was asked for may lead through one that is in this very directory.
        """
        if self._last is not None and self._last[1] != parent:
            self.forget()
        elif self._last is not None:
            self._last = self._last[2], parent, self._last[2]


def _opened(name: str, parent: int) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=parent)
    except OSError as error:
        # a link is ENOTDIR or ELOOP, as the kernel likes
        if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            raise
        raise NotADirectoryError(error.errno, error.strerror) from None


def _link(name: str, parent: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None


def remove_below(name: str, parent: int) -> None:
    """Removes a directory of an open directory with everything in it.

    Raises:
        OSError: something in it could not be removed.
    """
    if not scratch.remove(f"/proc/self/fd/{parent}/{name}"):
        raise OSError(errno.ENOTEMPTY, "it could not be removed", name)
