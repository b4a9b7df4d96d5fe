"""Unpacks one layer of an image into a folder of its own.

Where the user has a range of numbers (`owner_namespace`), files keep their owners. Elsewhere they
belong to the user who unpacks them: an overlay that the user mounts later needs that. Set-user-ID
and set-group-ID bits are removed. Device nodes, pipes, sockets, file capabilities and extended
attributes are left out; an attribute such as `user.overlay.redirect` would change what an overlay
shows.

What a layer removes from those below it (whiteouts) is noted in `LayerNotes`, and `merge_layers`
carries it out. An entry that breaks a rule refuses the image.
"""

from __future__ import annotations

import json
import os
import struct
import tarfile
from dataclasses import asdict, dataclass, field
from typing import IO

from ..sandbox.user_namespace import SPAN
from .confined_tree import ConfinedTree, Parts, parts_of, shown
from .image_errors import ImageRefused, of_os_error
from .image_limits import UnpackBudget
from .layer_stream import LayerStream

_WHITEOUT, _OPAQUE, _AUFS = ".wh.", ".wh..wh..opq", ".wh..wh."
_PIECE = 1 << 20
_TIME_MAX = 1 << 33  # seconds; later times are no real ones
# What tarfile raises for headers that no tar program writes, besides its own errors.
_BAD_TAR = (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError, struct.error,
            LookupError, AttributeError, TypeError)


@dataclass
class LayerNotes:
    """What a layer is besides its files.

    Attributes:
        removed: paths of lower layers that it removes.
        emptied: directories of lower layers of which it removes everything.
        late_links: pairs of a path and the file of a lower layer to which it is a hard link.
        implied: its directories without an entry of their own. Where a lower layer has such a
            directory, that layer says whose it is and which mode it has.
        size: bytes of its files.
        entries: how many files, links and directories it has.
        left_out: how many entries of kinds that an image cannot have here were left out.
    """

    removed: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    late_links: list[tuple[str, str]] = field(default_factory=list)
    implied: list[str] = field(default_factory=list)
    size: int = 0
    entries: int = 0
    left_out: int = 0

    def to_json(self) -> str:
        """Returns the notes as text; `from_json` reads it. An empty `implied` is left out, because
        earlier releases refuse a field that they do not know."""
        values = asdict(self)
        if not self.implied:
            del values["implied"]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> LayerNotes:
        """Reads what `to_json` wrote."""
        notes = cls(**json.loads(text))
        notes.late_links = [(path, target) for path, target in notes.late_links]
        return notes


def unpack_layer(file: IO[bytes], folder: str, budget: UnpackBudget, owners: bool = False
                 ) -> tuple[LayerNotes, str]:
    """Unpacks a layer into an empty folder; returns its notes and the digest of its tar.

    Args:
        file: the layer, compressed by gzip or zstd or not at all.
        folder: the folder to fill. After an error it holds a part of the layer.
        budget: what the image may still take; what the layer takes is subtracted.
        owners: whether files keep their owners, for which this process must be root, at least of a
            user namespace. An owner whose number no sandbox has is replaced by root.

    Raises:
        ImageRefused: the layer breaks a rule, is damaged or too large.
        ImageUnavailable: the disk is full or fails.
    """
    stream, notes, tree = LayerStream(file, budget), LayerNotes(), ConfinedTree(folder)
    unpacking = _Unpacking(stream, notes, tree, budget, owners)
    try:
        tar = _opened(stream)
        while tar is not None and (member := _next(tar)) is not None:
            budget.take_entry()
            unpacking.add(member)
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them
            stream.next_entry()
        tree.set_times()
        notes.implied = sorted(map("/".join, tree.implied))
        notes.late_links = [*unpacking.late.items()]
        return notes, stream.drain()
    finally:
        tree.close()


def _opened(stream: LayerStream) -> tarfile.TarFile | None:
    """Opens a layer; None for one without a single byte."""
    try:
        return tarfile.TarFile(fileobj=stream, mode="r")  # type: ignore[arg-type]
    except _BAD_TAR as error:
        if isinstance(error, tarfile.ReadError) and not stream.tell():
            return None
        raise ImageRefused(f"image: a layer is not a valid tar ({_one_line(error)})") from None


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return tar.next()
    except _BAD_TAR as error:
        raise ImageRefused(f"image: a layer is not a valid tar ({_one_line(error)})") from None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class _Unpacking:
    """The unpacking of one layer.

    Attributes:
        late: what `LayerNotes.late_links` will hold.
    """

    def __init__(self, stream: LayerStream, notes: LayerNotes, tree: ConfinedTree,
                 budget: UnpackBudget, owners: bool) -> None:
        self._stream, self._notes, self._tree, self._budget = stream, notes, tree, budget
        self._owners = owners
        self.late = dict[str, str]()

    def add(self, member: tarfile.TarInfo) -> None:
        """Makes one entry."""
        parts = parts_of(member.name)
        if member.size < 0:
            raise ImageRefused(f"image: a layer has {shown(member.name)} with a negative size")
        if not parts:
            return
        self.late.pop("/".join(parts), None)
        try:
            if parts[-1].startswith(_WHITEOUT):
                self._whiteout(parts)
            elif member.isdir():
                self._folder(parts, member)
            elif member.issym():
                self._symbolic_link(parts, member)
            elif member.islnk():
                self._hard_link(parts, member)
            elif member.isreg() or member.type == tarfile.CONTTYPE or member.sparse is not None:
                self._file(parts, member)
            else:
                self._notes.left_out += 1
                return
        except OSError as error:
            raise of_os_error(f"entry {shown(member.name)}", error) from None
        self._notes.entries += 1

    def _whiteout(self, parts: Parts) -> None:
        name = parts[-1]
        if name == _OPAQUE:
            self._notes.emptied.append("/".join(parts[:-1]))
        elif not name.startswith(_AUFS):
            gone = name[len(_WHITEOUT):]
            if gone in ("", ".", ".."):
                raise ImageRefused(f"image: a layer has the whiteout {shown('/'.join(parts))}, "
                                   "which removes no file of the image")
            self._notes.removed.append("/".join((*parts[:-1], gone)))

    def _folder(self, parts: Parts, member: tarfile.TarInfo) -> None:
        parent = self._tree.folder(parts[:-1])
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        except FileExistsError:
            if not _is_folder(parts[-1], parent):
                self._tree.clear(parent, parts[-1])
                os.mkdir(parts[-1], 0o700, dir_fd=parent)
        if self._owners:
            os.chown(parts[-1], *_owner(member), dir_fd=parent, follow_symlinks=False)
        os.chmod(parts[-1], member.mode & 0o1777 | 0o700, dir_fd=parent)
        real = (*self._tree.real(parts[:-1]), parts[-1])
        self._tree.implied.discard(real)
        self._tree.times["/".join(real)] = _time(member)

    def _symbolic_link(self, parts: Parts, member: tarfile.TarInfo) -> None:
        if not member.linkname or "\0" in member.linkname:
            raise ImageRefused(f"image: a layer has the link {shown(member.name)} without a target")
        parent = self._tree.folder(parts[:-1])
        self._tree.clear(parent, parts[-1])
        os.symlink(member.linkname, parts[-1], dir_fd=parent)
        if self._owners and any(_owner(member)):
            os.chown(parts[-1], *_owner(member), dir_fd=parent, follow_symlinks=False)

    def _hard_link(self, parts: Parts, member: tarfile.TarInfo) -> None:
        target = parts_of(member.linkname)
        if not target or target == parts:
            raise ImageRefused(f"image: a layer has {shown(member.name)} as a hard link to "
                               f"{shown(member.linkname)}, which must be another file of the image")
        self._tree.folder(parts[:-1])
        try:
            source = os.dup(self._tree.folder(target[:-1], make=False))
        except FileNotFoundError:
            return self._link_late(parts, target)
        try:
            if _is_folder(target[-1], source):
                raise ImageRefused(f"image: a layer has {shown(member.name)} as a hard link to the "
                                   f"directory {shown(member.linkname)}")
            os.lstat(target[-1], dir_fd=source)
            parent = self._tree.folder(parts[:-1])
            self._tree.clear(parent, parts[-1])
            os.link(target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent,
                    follow_symlinks=False)
        except FileNotFoundError:
            self._link_late(parts, target)
        finally:
            os.close(source)

    def _link_late(self, parts: Parts, target: Parts) -> None:
        self._tree.clear(self._tree.folder(parts[:-1]), parts[-1])
        name = "/".join(target)
        self.late["/".join(parts)] = self.late.get(name, name)

    def _file(self, parts: Parts, member: tarfile.TarInfo) -> None:
        parent = self._tree.folder(parts[:-1])
        self._tree.clear(parent, parts[-1])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(parts[-1], flags, 0o600, dir_fd=parent)
        try:
            self._stream.in_data = True
            if member.sparse is not None:
                self._sparse(fd, member)
            else:
                self._content(fd, member)
            if self._owners and any(_owner(member)):
                os.fchown(fd, *_owner(member))
            os.fchmod(fd, member.mode & 0o777 | 0o600)
            os.utime(fd, ns=(0, _time(member)))
        finally:
            os.close(fd)
        self._notes.size += member.size

    def _content(self, fd: int, member: tarfile.TarInfo) -> None:
        self._stream.seek(member.offset_data)
        left = member.size
        while left:
            piece = self._stream.read(min(left, _PIECE))
            if not piece:
                raise ImageRefused(f"image: a layer ends within {shown(member.name)}")
            _write(fd, piece)
            left -= len(piece)

    def _sparse(self, fd: int, member: tarfile.TarInfo) -> None:
        """Writes the parts of a sparse file that have content; the rest stays a hole."""
        self._budget.take_bytes(member.size)
        at = member.offset_data
        pieces: list[tuple[int, int]] = member.sparse or []  # type: ignore[assignment]
        for offset, size in pieces:
            if offset < 0 or size < 0 or offset + size > member.size:
                raise ImageRefused(f"image: a layer has the sparse file {shown(member.name)} with "
                                   "content outside of its size")
            self._stream.seek(at)
            at += size
            os.lseek(fd, offset, os.SEEK_SET)
            while size:
                piece = self._stream.read(min(size, _PIECE))
                if not piece:
                    raise ImageRefused(f"image: a layer ends within {shown(member.name)}")
                _write(fd, piece)
                size -= len(piece)
        os.ftruncate(fd, member.size)


def _owner(member: tarfile.TarInfo) -> tuple[int, int]:
    uid, gid = (number if 0 <= number < SPAN else 0 for number in (member.uid, member.gid))
    return uid, gid


def _time(member: tarfile.TarInfo) -> int:
    """Returns the time of change of an entry in ns."""
    when = member.mtime if member.mtime == member.mtime else 0  # not a number
    return int(min(max(when, 0), _TIME_MAX) * 1e9)


def _is_folder(name: str, parent: int) -> bool:
    try:
        os.close(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                         dir_fd=parent))
    except (NotADirectoryError, FileNotFoundError):
        return False
    return True


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]
