"""An executor whose sessions are snapshotted, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from helpers.image_session_rig import ImageSessionRig
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import SnapshotOrder
from tangram_hpc.protocol.payload import SnapshotCall, SnapshotReturn


class SnapshotRig(ImageSessionRig):
    """An executor, and the snapshots that it takes."""

    def new_name(self) -> str:
        return f"snap-{os.urandom(12).hex()}"

    def try_snapshot(self, session: int) -> tuple[str, Outcome]:
        name = self.new_name()
        lease = self.begin(SnapshotCall(name), Kind.FILE, session=session, cores=())
        outcome, told, _ = self.end(lease)
        if outcome.state is ActionState.COMPLETED:
            assert told == SnapshotReturn(name)
        return name, outcome

    def take(self, session: int) -> str:
        name, outcome = self.try_snapshot(session)
        assert outcome.state is ActionState.COMPLETED, outcome
        return name

    def order(self, name: str, what: str, **fields: str) -> None:
        self.loop.call_soon(self.executor.order_snapshot, SnapshotOrder(name, what, **fields))

    def told(self, name: str, what: str) -> Any:
        """Waits for a report about a snapshot, and returns it."""
        def found() -> list[Any]:
            return [one for one in self.snapshots if (one.name, one.what) == (name, what)]

        self.until(lambda: bool(found()))
        return found()[-1]

    def folder_of(self, name: str) -> Path:
        return Path(self.executor._snapshots._by_name[name].folder)

    def folders(self) -> list[Path]:
        """Returns the folders of all snapshots that are on the disk."""
        return [Path(one.folder) for one in self.executor._snapshots._all]
