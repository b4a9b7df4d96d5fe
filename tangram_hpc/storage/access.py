"""The access file: where a job's broker listens, and its key.

It is JSON in a file of mode 0600 in a folder of mode 0700, and every reader checks that. The key is
in nothing else: no argument, no environment variable, no log. When the broker ends in order, the
file stays with `ended` set and without key and addresses. A client that comes later then gets a
clear message instead of a refused connection.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..atomic_file import replace_file
from ..errors import AccessError

FORMAT = "tangram-access/1"


@dataclass(frozen=True)
class Access:
    """What a client or worker needs to reach a broker.

    Attributes:
        job: The job's name.
        addresses: Where the broker listens, such as `unix:PATH` and
            `tls:HOST:PORT#FINGERPRINT`, in the order in which clients try them.
        key: The job's secret.
        store: The folder of large payloads.
        host: The broker's host name.
        pid: The broker's process id.
        back_within_s: If the broker does not answer, how long to wait for it, in seconds: its
            parent starts it again when it has crashed. 0 if nobody would do so.
    """

    job: str
    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    store: str
    host: str = ""
    pid: int = 0
    back_within_s: float = 0.0


def write_access(path: Path, access: Access) -> None:
    """Writes the file atomically with mode 0600."""
    fields = {**asdict(access), "format": FORMAT, "key": access.key.hex(), "ended": ""}
    _replace(path, fields)


def mark_ended(path: Path, job: str, when: str) -> None:
    """Replaces the file by a tombstone: the job has ended at `when`."""
    _replace(path, {"format": FORMAT, "job": job, "ended": when})


def _replace(path: Path, fields: dict[str, object]) -> None:
    replace_file(path, json.dumps(fields))


def read_access(path: Path) -> Access:
    """Returns the content of an access file.

    Raises:
        AccessError: The file is missing, readable by others, owned by somebody else or no access
            file, or its job has ended. The text is one line, with the remedy.
    """
    try:
        info = os.stat(path)
        text = path.read_text()
    except OSError as error:
        raise AccessError(f"access file {path}: {error.strerror}; is the job running, and does "
                          "TANGRAM_ACCESS name its file?") from None
    if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AccessError(f"access file {path}: others may read it (mode "
                          f"{stat.S_IMODE(info.st_mode):04o}); run `chmod 600 {path}` and restart "
                          "the job, its key is no longer secret")
    if info.st_uid != os.getuid():
        raise AccessError(f"access file {path}: it belongs to user {info.st_uid}, not to you")
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise AccessError(f"access file {path}: format {fields['format']!r} is not {FORMAT}")
        if fields["ended"]:
            raise AccessError(f"access file {path}: job {fields['job']} has ended at "
                              f"{fields['ended']}; start a new one")
        return Access(fields["job"], tuple(fields["addresses"]), bytes.fromhex(fields["key"]),
                      fields["store"], fields["host"], fields["pid"],
                      fields.get("back_within_s", 0.0))
    except (ValueError, KeyError, TypeError) as error:
        raise AccessError(f"access file {path}: not an access file ({error!r})") from None
