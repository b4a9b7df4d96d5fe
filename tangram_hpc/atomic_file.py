"""Replaces files and links in one step, so that a reader never sees half of one.

The content is written to a temporary file in the same folder, which is then renamed over the
target. Writers of one target may be threads, processes with the same number in different
containers, or processes of other nodes on a shared file system. The temporary file's name is
therefore random and the file is created with O_EXCL; a process number in the name would let two
writers share one file.

Invariants: a reader sees the old file or the new one, and a failed write leaves no temporary file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import InvalidInput


def replace_file(path: Path, content: str | bytes | bytearray | memoryview, mode: int = 0o600,
                 sync: bool = False) -> None:
    """Replaces whatever is at `path` by a file with this content.

    Args:
        path: the target; its folder must exist.
        content: the new content; a str is written as UTF-8.
        mode: permissions of the new file, less the umask.
        sync: wait until the content is on the disk before the file appears.

    Raises:
        OSError: the file cannot be written; the earlier content of `path` is still there.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(temporary: Path) -> None:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    _replace(path, write)


def replace_link(path: Path, target: str) -> None:
    """Replaces the file or link at `path` by a symbolic link; raises as `replace_file`."""
    _replace(path, lambda temporary: temporary.symlink_to(target))


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    with replacing(path) as temporary:
        make(temporary)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, for the caller to make; at the end it replaces whatever
    is at `path`, or it is removed if the caller raises an error.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def check_output(option: str, path: Path) -> None:
    """Raises InvalidInput, which names the option, if `replacing_output` could not write at `path`.
    A command asks before work that takes minutes. Only a place that is full is found out later.
    """
    wrong, real = 0, Path(os.path.realpath(path))
    if os.path.isdir(path):
        wrong = errno.EISDIR
    elif os.path.exists(path):
        replaced = not _stays(path, real) and os.stat(path).st_uid == os.geteuid()
        wrong = 0 if replaced or os.access(path, os.W_OK) else errno.EACCES
    elif not os.path.isdir(real.parent):
        wrong = errno.ENOENT
    elif not os.access(real.parent, os.W_OK):
        wrong = errno.EACCES
    if wrong:
        raise InvalidInput(f"{option} {path}: {os.strerror(wrong)}")


@contextlib.contextmanager
def replacing_output(path: Path) -> Iterator[Path]:
    """Yields the path at which the output file of a command is to be written, so that an error or
    an interrupt in the middle leaves what was there before, and no half of the new content.

    A device or a pipe such as /dev/stdout is written as it is, and so is a file in a folder that
    may not be written. A symbolic link stays, and its target is replaced. A file that is replaced
    leaves its permissions to the new one, which is then there, empty, to be written.
    """
    real = Path(os.path.realpath(path))
    if _stays(path, real):
        yield path  # not `real`: where /dev/stdout is a pipe, no file has that name
        return
    with replacing(real) as temporary:
        if real.exists():
            temporary.touch(mode=0o600, exist_ok=False)
            temporary.chmod(stat.S_IMODE(real.stat().st_mode) | stat.S_IWUSR)
        yield temporary


def _stays(path: Path, real: Path) -> bool:
    """Whether there is something at `path` that is written over, not replaced."""
    return os.path.exists(path) and not (
        os.path.isfile(path) and os.access(real.parent, os.W_OK))
