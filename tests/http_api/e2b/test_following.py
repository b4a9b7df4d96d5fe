"""The follower of background commands, with a file that grows whenever it is read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tangram_hpc import Session
from tangram_hpc.http_api.e2b.following import PIECE, Follower
from tangram_hpc.http_api.e2b.running_command import CommandConfig, SandboxProcess
from tangram_hpc.http_api.e2b.started_command import Started


class EndlessFile:
    """A session whose file `1.out` grows by two pieces whenever one piece of it is read."""

    def __init__(self) -> None:
        self.size, self.reads = PIECE + 1, 0
        self.removed: list[str] = []

    async def listing(self, path: str, depth: int) -> list[Any]:
        """The one file as it is now."""
        return [SimpleNamespace(name="1.out", size=self.size)]

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """The next piece."""
        self.reads += 1
        assert self.reads < 10, "the reader runs after a file that grows faster"
        data = bytes(min(length, self.size - offset))
        self.size += 2 * PIECE
        return data

    async def remove(self, path: str) -> None:
        """Notes what is removed."""
        self.removed.append(path)


def test_the_last_command_can_be_forgotten_during_a_pause() -> None:
    async def follow() -> None:
        process = SandboxProcess(CommandConfig("sleep"), False)
        process.started = Started(3, "/tmp/.d/1")
        follower = Follower(cast(Session, EndlessFile()), lambda _: None)
        follower.follow(process)
        await asyncio.sleep(0)
        follower.forget(process)
        assert follower._task is not None
        await follower._task

    asyncio.run(follow())


def test_a_file_that_grows_for_ever_does_not_hold_up_the_commands_end() -> None:
    async def follow() -> tuple[SandboxProcess, list[SandboxProcess]]:
        forgotten: list[SandboxProcess] = []
        process = SandboxProcess(CommandConfig("yes"), False)
        process.started = Started(3, "/tmp/.d/1")
        session = EndlessFile()
        await Follower(cast(Session, session), forgotten.append).killed(process)
        assert session.removed == ["/tmp/.d/1.out", "/tmp/.d/1.err", "/tmp/.d/1.code"]
        return process, forgotten

    process, forgotten = asyncio.run(follow())
    assert process.ended and forgotten == [process] and process.taken == [PIECE + 1, 0]
