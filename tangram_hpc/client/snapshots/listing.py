"""Lists and removes the snapshots of the job."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import InvalidInput
from ...protocol import message as ms
from ..connection import Connection


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot of the job.

    Attributes:
        name: its name, for `Client.session(snapshot=...)`.
        nodes: the names of the nodes that have its files. A session may begin from it on any node.
        mib: the space that it takes on a node, in MiB. Layers that belong to the snapshots below it
            are not counted.
        image: the image of the session of which it was taken; empty for none.
        digest: the digest of that image; empty for none and for a plain folder.
        session: the id of that session; empty if the broker was started again and only nodes that
            fetched the snapshot are there.
        taken_s: when it was taken, in seconds since the epoch.
        sessions: how many open sessions began from it.
        prepared: whether it is a prepared environment.
    """

    name: str
    nodes: tuple[str, ...]
    mib: int
    image: str
    digest: str
    session: str
    taken_s: float
    sessions: int
    prepared: bool


def listed(connection: Connection) -> list[SnapshotInfo]:
    """Returns all snapshots of the job; see `Client.snapshots`."""
    answer: Any = connection.request(lambda request: ms.ManageSnapshot(request, "list"))
    return msgspec.convert(answer["snapshots"], list[SnapshotInfo])


def removed(connection: Connection, name: str) -> bool:
    """Removes a snapshot; see `Client.remove_snapshot`."""
    if not isinstance(name, str):
        raise InvalidInput(f"name: {name!r:.60} is not the name of a snapshot")
    answer: Any = connection.request(lambda request: ms.ManageSnapshot(request, "remove", name))
    return bool(answer["removed"])
