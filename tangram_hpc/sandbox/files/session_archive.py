"""Packs a session's files into one archive in the store, and unpacks them on the session's next
node.

An archive is a tar of the files in a scratch directory: names, contents, modes, times and links.
The layer of changes to an image is packed with the attributes that an overlay keeps in it, with the
layers of snapshots below it, and with the owners of its files, by their numbers in the sandbox. A
frozen folder (`frozen_files.py`) is packed in the same way.

The system's tar makes and opens the archive. That tar follows no link out of the directory that it
reads, and it makes links that point elsewhere only after everything else. Nothing may run in the
directory meanwhile.
"""

from __future__ import annotations

import io
import mmap
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from ...ports import Store
from .. import user_namespace
from ..user_namespace import UserMap
from . import root_record, scratch

ARCHIVE_MAX = 1 << 30  # bytes; a session with more does not move
_PIECE = 1 << 20
_HEADERS = 1 << 14  # bytes at the beginning of an archive that hold the headers of its first entry
# If a session has a root record, it is the first entry of its archive (`_has_root` reads it).
_PARTS = (scratch.root_record, scratch.home, scratch.tmp, scratch.changes)
_LAYER = ("--xattrs", "--xattrs-include=user.*")  # for layers only, as some tars lack them
_PACK = ("tar", "--create", "--format=posix", "--sparse", "--file=-")
_UNPACK = ("tar", "--extract", "--preserve-permissions", "--numeric-owner", "--file=-")

Stopped = Callable[[], bool]  # whether the worker ends, so that nobody needs the archive


class ArchiveError(Exception):
    """A session's files could not be packed or unpacked; the text is one line that says why."""


def pack(folder: str, store: Store, stopped: Stopped, owner: str = "") -> str:
    """Stores what a scratch directory holds; returns the archive's digest. Blocks, and needs as
    much space again on the same disk meanwhile.

    Raises:
        ArchiveError: the files are too large, or one cannot be read.
        OSError: the disk is full, or there is no tar.
        StoreFailed: the store cannot be written.
    """
    with _scrap(folder) as file, _scrap(folder) as said:
        names = [os.path.relpath(path, folder) for part in _PARTS
                 if os.path.exists(path := part(folder))]
        record = root_record.recorded(folder)
        below = [word for layer in (record.layers if record is not None else ())
                 for word in ("--directory", os.path.dirname(layer), os.path.basename(layer))]
        command = [*scratch.as_owner(folder), *_PACK, *(_LAYER if record is not None else ()),
                   "--directory", folder, *names, *below]
        with _tar(command, said, out=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            why, size = "", 0
            while piece := tar.stdout.read(_PIECE):
                size += len(piece)
                if size > ARCHIVE_MAX or stopped():
                    why = f"its files are more than {ARCHIVE_MAX >> 20} MiB"
                    tar.kill()
                    break
                _write(file, piece)
        _judge(tar, said, why)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
            return store.put(view, owner)


def unpack(digest: str, folder: str, store: Store, stopped: Stopped, users: UserMap | None = None
           ) -> None:
    """Makes a scratch directory from an archive. Blocks.

    Args:
        digest: the digest of the archive.
        folder: the directory to make.
        store: the store that holds the archive.
        stopped: see `Stopped`.
        users: the map of users of a sandbox on this node that writes its image, if it has several:
            the files of such a sandbox keep their owners. All other files belong to this user.

    Raises:
        ArchiveError: not everything could be written.
        OSError: the directory cannot be made, or there is no tar.
        InvalidInput: the store does not have the archive.
    """
    whole = memoryview(store.get(digest))
    if not _has_root(whole):
        users = None
    scratch.make(folder)
    with _scrap(folder) as said:
        words = (*user_namespace.prefix(users), *_UNPACK, "--same-owner") if users else (
            *_UNPACK, "--no-same-owner")
        with _tar([*words, *_LAYER, "--directory", folder], said, into=subprocess.PIPE) as tar:
            assert tar.stdin is not None
            try:
                for at in range(0, len(whole), _PIECE):
                    if stopped():
                        tar.kill()
                    _write(tar.stdin, whole[at : at + _PIECE])
            except BrokenPipeError:
                pass  # tar says why
        _judge(tar, said, "")
    root_record.settled_in(folder)
    if users:
        scratch.note_users(folder, users)


def _has_root(archive: memoryview) -> bool:
    """Returns whether an archive holds the root of an image."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive[:_HEADERS]), mode="r:") as tar:
            first = tar.next()
    except tarfile.TarError:  # the program tar will say why when it unpacks the archive
        return False
    return first is not None and first.name == os.path.basename(scratch.root_record(""))


def _scrap(folder: str) -> IO[bytes]:
    """Opens a file without a name on the disk of a scratch directory. The file is gone once this
    process has ended, in whatever way.
    """
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _tar(command: Sequence[str], said: IO[bytes], *, into: int = subprocess.DEVNULL,
         out: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    # the user's TAR_OPTIONS must not reach tar
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    return subprocess.Popen(command, 0, env=env, stdin=into, stdout=out, stderr=said)


def _write(file: IO[bytes], piece: bytes | memoryview) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest):]


def _judge(tar: subprocess.Popen[bytes], said: IO[bytes], why: str) -> None:
    """Raises ArchiveError when a tar that has ended failed. Warnings of a tar that succeeded, such
    as a socket left out, are ignored.
    """
    if tar.returncode or why:
        said.seek(0)
        lines = said.read(400).decode(errors="replace").strip().splitlines()
        raise ArchiveError(f"move: {why or (lines[0] if lines else 'tar failed')}")
