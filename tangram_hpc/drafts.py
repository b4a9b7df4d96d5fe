"""Files that appear whole: a draft is made exclusively beside its place and renamed over it.

Writers of one file are threads, processes with the same number in different containers, and
processes of other nodes on a shared file system. So a draft's name is random and it is made with
O_EXCL; a process number in the name would let two writers share one draft.

Law: a reader sees the old file or the new one, never a part; a failure leaves no draft.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, content: str | bytes | bytearray | memoryview, mode: int = 0o600,
                 sync: bool = False) -> None:
    """Puts a file in the place of whatever is at `path`.

    Args:
        path: where; its folder must exist.
        content: a text is written as UTF-8.
        mode: of the new file, less the umask.
        sync: whether the content is on the disk before the file appears.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(draft: Path) -> None:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    _replace(path, write)


def replace_link(path: Path, target: str) -> None:
    """Puts a symbolic link in the place of the file or link at `path`. Raises OSError as above."""
    _replace(path, lambda draft: draft.symlink_to(target))


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        make(draft)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
