"""Owns: a session's files as one piece, for its next home - packing and unpacking them through the
store. Must not be called while anything runs in the directory.

A piece is a tar of what a scratch directory holds for its user (names, contents, modes, times,
links), made and opened by the system's tar, which follows no link out of the directory that it
reads and makes those that point elsewhere only when all else is written.
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
_NAMES = (os.path.basename(scratch.home("/")), os.path.basename(scratch.tmp("/")))
_PACK = ("tar", "--create", "--format=posix", "--sparse", "--file=-")
_UNPACK = ("tar", "--extract", "--preserve-permissions", "--no-same-owner", "--file=-")

Stopped = Callable[[], bool]  # whether the worker ends and nobody needs the piece


class ArchiveError(Exception):
    """A session's files could not be packed or unpacked; the text is one line that says why."""


def pack(folder: str, store: Store, stopped: Stopped, owner: str = "") -> str:
    """Stores what a scratch directory holds; returns its name in the store. Needs as much space
    again beside it while it lasts. Blocks.

    Raises:
        ArchiveError: it is too much, or something cannot be read.
        OSError: there is no room, or no tar.
        InvalidInput: the store cannot be written.
    """
    with _scrap(folder) as file, _scrap(folder) as said:
        with _tar([*_PACK, "--directory", folder, *_NAMES], said, out=subprocess.PIPE) as tar:
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
    """Makes a scratch directory that holds what was packed. Blocks.

    Raises:
        ArchiveError: not all could be written.
        OSError: the directory cannot be made, or there is no tar.
        InvalidInput: the store does not have it.
    """
    whole = memoryview(store.get(digest))
    scratch.make(folder)
    with _scrap(folder) as said:
        with _tar([*_UNPACK, "--directory", folder], said, into=subprocess.PIPE) as tar:
            assert tar.stdin is not None
            try:
                for at in range(0, len(whole), _PIECE):
                    if stopped():
                        tar.kill()
                    _write(tar.stdin, whole[at : at + _PIECE])
            except BrokenPipeError:
                pass  # it says why
        _judge(tar, said, "")


def _scrap(folder: str) -> IO[bytes]:
    """A file without a name on the disk of a scratch directory: gone with us, whatever happens."""
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _tar(command: Sequence[str], said: IO[bytes], *, into: int = subprocess.DEVNULL,
         out: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}  # no options of its user's
    return subprocess.Popen(command, 0, env=env, stdin=into, stdout=out, stderr=said)


def _write(file: IO[bytes], piece: bytes | memoryview) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest):]


def _judge(tar: subprocess.Popen[bytes], said: IO[bytes], why: str) -> None:
    """Of a tar that has ended. What it says without failing (a socket was left out) is no harm."""
    if tar.returncode or why:
        said.seek(0)
        lines = said.read(400).decode(errors="replace").strip().splitlines()
        raise ArchiveError(f"move: {why or (lines[0] if lines else 'tar failed')}")
