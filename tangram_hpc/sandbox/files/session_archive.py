"""Packs a session's files into one archive in the store, and unpacks them on the session's next
node.

An archive is a tar of what a scratch directory holds for its user: names, contents, modes, times
and links. The layer of changes to an image comes with the attributes that an overlay keeps in it.
The system's tar makes and opens the archive. That tar follows no link out of the directory that it
reads, and it makes links that point elsewhere only after everything else. Nothing may run in the
directory meanwhile.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from ...ports import Store
from . import scratch

ARCHIVE_MAX = 1 << 30  # bytes; a session with more does not move
_PIECE = 1 << 20
_PARTS = (scratch.home, scratch.tmp, scratch.changes, scratch.root_record)
_LAYER = ("--xattrs", "--xattrs-include=user.*")  # of a layer; tar may have been built without them
_PACK = ("tar", "--create", "--format=posix", "--sparse", "--file=-")
_UNPACK = ("tar", "--extract", "--preserve-permissions", "--no-same-owner", "--file=-")

Stopped = Callable[[], bool]  # whether the worker ends, so that nobody needs the archive


class ArchiveError(Exception):
    """A session's files could not be packed or unpacked; the text is one line that says why."""


def pack(folder: str, store: Store, stopped: Stopped, owner: str = "") -> str:
    """Stores what a scratch directory holds; returns the archive's digest. Blocks, and needs as
    much space again on the same disk meanwhile.

    Raises:
        ArchiveError: the files are too large, or one cannot be read.
        OSError: the disk is full, or there is no tar.
        InvalidInput: the store cannot be written.
    """
    with _scrap(folder) as file, _scrap(folder) as said:
        names = [os.path.relpath(path, folder) for part in _PARTS
                 if os.path.exists(path := part(folder))]
        layer = _LAYER if len(names) == len(_PARTS) else ()
        command = [*scratch.as_owner(folder), *_PACK, *layer, "--directory", folder, *names]
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


def unpack(digest: str, folder: str, store: Store, stopped: Stopped) -> None:
    """Makes a scratch directory from an archive. Blocks.

    Raises:
        ArchiveError: not everything could be written.
        OSError: the directory cannot be made, or there is no tar.
        InvalidInput: the store does not have the archive.
    """
    whole = memoryview(store.get(digest))
    scratch.make(folder)
    with _scrap(folder) as said:
        with _tar([*_UNPACK, *_LAYER, "--directory", folder], said, into=subprocess.PIPE) as tar:
            assert tar.stdin is not None
            try:
                for at in range(0, len(whole), _PIECE):
                    if stopped():
                        tar.kill()
                    _write(tar.stdin, whole[at : at + _PIECE])
            except BrokenPipeError:
                pass  # tar says why
        _judge(tar, said, "")


def _scrap(folder: str) -> IO[bytes]:
    """A file without a name on the disk of a scratch directory. It goes with this process in any
    case.
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
