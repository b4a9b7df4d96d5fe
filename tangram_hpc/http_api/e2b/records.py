"""Records of sandboxes, from which a server can serve them after a restart: one file for each.

The files lie in a private folder of the job. Each file holds a token of the sandbox's session and
the sandbox's own access token, so only this user may read it, like the job's access file. Several
servers of a job share the folder, so that a sandbox can be reached through any of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ...atomic_file import replace_file

ID = re.compile(r"i[0-9a-f]{20}")


@dataclass
class SandboxRecord:
    """A sandbox as it is written down.

    Attributes:
        id: its id on the wire.
        owner: the name of the client whose key made it.
        template: the template that its client named.
        handle: the text of a handle of its session; its holder may close the session.
        access_token: the token that the client sends with each call to the sandbox.
        metadata: the notes of its client about the sandbox.
        cpus: the fewest and the most CPUs of each of its commands.
        memory_mib: the memory that it holds, in MiB; 0 for no bound of its own.
        network: whether it has the node's network.
        started: when it was made, in seconds since the epoch.
        ends: when it is closed, in seconds since the epoch; the client may change that.
        latest: the end that its session has by itself; `ends` never exceeds it.
    """

    id: str
    owner: str
    template: str
    handle: str = field(repr=False)
    access_token: str = field(repr=False)
    metadata: dict[str, str]
    cpus: tuple[int, int]
    memory_mib: int
    network: bool
    started: float
    ends: float
    latest: float


class RecordFolder:
    """The records of a job's sandboxes, as files.

    Args:
        path: the folder; it is made when the first record is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: SandboxRecord) -> None:
        """Writes a record, or writes it again. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        self._path.mkdir(mode=0o700, exist_ok=True)
        replace_file(self._file(record.id), json.dumps(asdict(record)))

    def read(self, sandbox: str) -> SandboxRecord | None:
        """Returns the record of a sandbox; None if there is no valid record, or if its file does
        not belong to this user or is accessible to others. Blocks."""
        if not ID.fullmatch(sandbox):
            return None
        try:
            with open(self._file(sandbox), encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                known = json.load(file)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                return None
            known["cpus"] = tuple(known["cpus"])
            return SandboxRecord(**{each.name: known[each.name] for each in fields(SandboxRecord)})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def all(self) -> Iterator[SandboxRecord]:
        """Yields all records. Blocks."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._path)):
                record = self.read(name.removesuffix(".json"))
                if record is not None:
                    yield record

    def remove(self, sandbox: str) -> None:
        """Removes a record; nothing happens if there is none. Blocks."""
        with contextlib.suppress(OSError):
            self._file(sandbox).unlink()

    def _file(self, sandbox: str) -> Path:
        return self._path / f"{sandbox}.json"
