"""The access files: where a job's broker listens, and the key that opens it.

A job has two of them in its folder. `access.json` has the clients' key, and `worker.json` beside it
the workers' key. The broker takes a peer for what its key says, so who was given a copy of
`access.json` alone cannot join as a node. Each start of a broker has new keys.

Each is JSON in a file of mode 0600 in a folder of mode 0700, and every reader checks that. A key is
in nothing else: no argument, no environment variable, no log. When the broker ends in order, the
files stay with `ended` set and without key and addresses. A client that comes later then gets a
clear message instead of a refused connection.

The file says which epoch of the job's folder its broker has (`folder_lock.py`). A broker that was
stopped between its last check and the write of this file, and is continued after another one has
taken the folder, replaces the file of its successor. So a reader looks whether the epoch is still
there, and takes a file without it for the file of a broker that is gone: it gets no address, and
reads the file again after a while. The successor writes its own file again (`renew_access`).
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from ..atomic_file import replace_file
from ..errors import AccessError
from .folder_lock import epoch_is_gone

NAME = "access.json"  # in the folder of a job, for clients
WORKER_NAME = "worker.json"  # beside it, for workers
FORMAT = "tangram-access/1"
_NEXT_S = 30.0  # how long to wait for a broker that has taken the folder and does not serve yet


@dataclass(frozen=True)
class Access:
    """What a client or worker needs to reach a broker.

    Attributes:
        job: The job's name.
        addresses: Where the broker listens, such as `unix:PATH` and
            `tls:HOST:PORT#FINGERPRINT`, in the order in which clients try them.
        key: The secret of the job's clients, or that of its workers.
        store: The folder of large payloads.
        host: The broker's host name.
        pid: The broker's process id.
        back_within_s: If the broker does not answer, how long to wait for it, in seconds: its
            parent starts it again when it has crashed. 0 if nobody would do so.
        epoch: The broker's epoch of the job's folder; 0 if it has none.
    """

    job: str
    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    store: str
    host: str = ""
    pid: int = 0
    back_within_s: float = 0.0
    epoch: int = 0


class JobHasEnded(AccessError):
    """Raised when an access file says that its job's broker has ended in order.

    Attributes:
        job: The job's name.
        when: When the broker ended, for people.
    """

    def __init__(self, path: Path, job: str, when: str) -> None:
        super().__init__(f"access file {path}: job {job} has ended at {when}; start a new one, or "
                         "wait for its next start if Slurm has it in its queue again")
        self.job, self.when = job, when


def worker_file(path: Path) -> Path:
    """Returns the access file for workers that lies beside this one for clients. A file of another
    name, such as a copy, is returned as it is.
    """
    return path.with_name(WORKER_NAME) if path.name == NAME else path


def write_access(path: Path, access: Access) -> None:
    """Writes the file atomically with mode 0600."""
    fields = {**asdict(access), "format": FORMAT, "key": access.key.hex(), "ended": ""}
    _replace(path, fields)


def renew_access(path: Path, access: Access) -> None:
    """Writes the file again if a broker of an earlier epoch has replaced it since."""
    with suppress(OSError, ValueError):  # the next look comes soon
        if json.loads(path.read_text()).get("epoch", 0) < access.epoch:
            write_access(path, access)


def mark_ended(path: Path, job: str, when: str, epoch: int = 0) -> None:
    """Replaces the file, and that of the workers beside it, by a tombstone: the job has ended at
    `when`.

    Args:
        path: The access file for clients.
        job: The job's name.
        when: For people.
        epoch: The epoch of the broker that has ended; 0 if whoever writes knows that no broker
            serves.
    """
    for file in dict.fromkeys((worker_file(path), path)):
        if file == path or file.exists():
            _replace(file, {"format": FORMAT, "job": job, "ended": when, "epoch": epoch})


def _replace(path: Path, fields: dict[str, object]) -> None:
    replace_file(path, json.dumps(fields))


def may_serve(folder: Path) -> bool:
    """Returns whether the access file of a job's folder names a broker that serves, or was killed
    before it could mark its end.
    """
    try:
        return '"ended": ""' in (folder / NAME).read_text()
    except (OSError, ValueError):
        return False


def read_access(path: Path) -> Access:
    """Returns the content of an access file, without addresses if its broker has been superseded.

    Raises:
        AccessError: The file is missing, readable by others, owned by somebody else or no access
            file. The text is one line, with the remedy.
        JobHasEnded: The job has ended.
    """
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):  # a read of a pipe or a device may never end
            raise AccessError(f"access file {path}: it is not a regular file; name the access.json "
                              "of the job's folder in TANGRAM_ACCESS")
        text = path.read_bytes()
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
        epoch = fields.get("epoch", 0)
        if type(epoch) is int and epoch > 0 and epoch_is_gone(path.parent, epoch):
            known = msgspec.convert({"store": str(path.parent / "store"), **fields,
                                     "addresses": (), "key": b""}, Access)
            return replace(known, back_within_s=max(_NEXT_S, known.back_within_s))
        if fields["ended"]:
            raise JobHasEnded(path, fields["job"], fields["ended"])
        return msgspec.convert({**fields, "key": bytes.fromhex(fields["key"])}, Access)
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise AccessError(f"access file {path}: not an access file ({error!r})") from None
