"""The job's secrets: values that sessions get by name, such as tool keys.

A session's specification is journaled, shown and sent to other processes, so it may only hold the
names of secrets. The values are in one file of the job's folder, beside the access file and with
the same protection: mode 0600 in a folder of mode 0700, checked at each reading. A client writes
it, and the worker that opens a session reads it. Nothing else does: the values are in no message of
the broker, no journal, no entry of the store and no argument of a program (decision 0065).
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..atomic_file import replace_file
from ..errors import InvalidInput

NAME = "secrets.json"
FORMAT = "tangram-secrets/1"
SIZE_MAX = 1 << 20  # bytes of the file


class SecretsFile:
    """The secrets in a job's folder.

    Args:
        folder: the folder, which clients and workers share.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def keep(self, values: Mapping[str, str | None]) -> None:
        """Adds or replaces secrets; a value of None removes one. Several processes may call it at
        the same time.

        Raises:
            InvalidInput: the file cannot be used or written, or would become too large.
        """
        try:
            fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                         0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                known = {**self._read(), **values}
                content = json.dumps({"format": FORMAT, "secrets": {
                    name: value for name, value in known.items() if value is not None}})
                if len(content) > SIZE_MAX:
                    raise InvalidInput(f"secrets: more than {SIZE_MAX} bytes in all; give large "
                                       "data as files")
                replace_file(self._path, content)
            finally:
                os.close(fd)
        except OSError as error:
            raise InvalidInput(f"secrets: {self._path} cannot be written ({error.strerror})"
                               ) from None

    def values(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the values of these secrets by name.

        Raises:
            InvalidInput: one is not there, or the file cannot be used.
        """
        known = self._read()
        missing = [name for name in names if name not in known]
        if missing:
            raise InvalidInput(f"secrets: {', '.join(missing)}: not among the secrets of this job; "
                               "give the value by Client.keep_secrets")
        return {name: known[name] for name in names}

    def _read(self) -> dict[str, str]:
        try:
            with open(self._path, encoding="utf-8") as file:
                about = os.fstat(file.fileno())
                text = file.read(SIZE_MAX + 1)
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"secrets: {self._path} cannot be read "
                               f"({getattr(error, 'strerror', 'not UTF-8')})") from None
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or about.st_uid != os.getuid():
            raise InvalidInput(f"secrets: others may read {self._path}, or it is not yours; remove "
                               "it and give new values, these are no longer secret")
        try:
            fields = json.loads(text)
            if fields["format"] != FORMAT:
                raise ValueError
            return {str(name): str(value) for name, value in fields["secrets"].items()}
        except (ValueError, KeyError, TypeError, AttributeError,
                RecursionError):  # never shows what is in it
            raise InvalidInput(f"secrets: {self._path} is no file of secrets; remove it and give "
                               "the values again") from None
