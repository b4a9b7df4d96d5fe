"""Follows the background commands of one sandbox by the files to which they write their output.

One task lists the folder of these files for as long as there is such a command: soon again after
new output was found, and otherwise after longer and longer pauses. Listing and reading are file
calls of the session, which hold no CPU. While another command runs in the foreground, these calls
wait for it, so the output of background commands is passed on later; nothing of it is lost.

One look passes on no more than the files had when it began. A command that never stops writing, or
that leaves such a process behind, therefore holds up neither other commands nor its own end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from ... import FileMissing, Session, SessionLost, TangramError
from .command_launcher import KILLED, read_exit_code
from .running_command import SandboxProcess
from .wire_errors import gone

FIRST_S, LAST_S = 0.02, 1.0  # the shortest and the longest pause between two checks
PIECE = 1 << 20  # bytes of one read


class Follower:
    """Passes on what background commands write, and their ends.

    Args:
        session: the sandbox's session.
        forget: called with a command that has ended.
    """

    def __init__(self, session: Session, forget: Callable[[SandboxProcess], None]) -> None:
        self._session, self._forget = session, forget
        self._followed: dict[int, SandboxProcess] = {}  # by slot
        self._task: asyncio.Task[None] | None = None
        self._fresh = False  # whether a command was added since the last check

    def follow(self, process: SandboxProcess) -> None:
        """Begins to follow a command."""
        self._followed[process.slot] = process
        self._fresh = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def forget(self, process: SandboxProcess) -> None:
        """Stops following a command."""
        self._followed.pop(process.slot, None)

    async def killed(self, process: SandboxProcess) -> None:
        """Passes on the last output of a command that was killed with its keeper, and its end."""
        if not process.ended:
            with contextlib.suppress(TangramError):
                await self._pass_output(process, await self._sizes(process))
            self._end(process, KILLED, "signal: killed")

    def close(self) -> None:
        """Stops following."""
        self._followed.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        pause_s = FIRST_S
        while self._followed:
            await asyncio.sleep(pause_s)
            try:
                moved = await self._look()
            except SessionLost:
                for process in list(self._followed.values()):
                    process.fail(gone(self._session.name.removeprefix("e2b-")))
                return
            except TangramError:
                moved = False  # the broker cannot be reached for a while, or the folder was removed
            pause_s = FIRST_S if moved or self._fresh else min(LAST_S, pause_s * 1.5)
            self._fresh = False

    async def _look(self) -> bool:
        """Checks the files once; returns whether anything has changed."""
        first = next(iter(self._followed.values()), None)  # all have the same folder
        if first is None:
            return False  # the last one was forgotten during the pause
        sizes = await self._sizes(first)
        moved = False
        for slot, process in list(self._followed.items()):
            if sizes.get(f"{slot}.code", 0):
                moved = await self._pass_end(process) or moved
            elif not process.is_heard:
                process.taken = [sizes.get(f"{slot}.out", 0), sizes.get(f"{slot}.err", 0)]
            elif (sizes.get(f"{slot}.out", 0) > process.taken[0]
                    or sizes.get(f"{slot}.err", 0) > process.taken[1]):
                await self._pass_output(process, sizes)
                moved = True
        return moved

    async def _pass_end(self, process: SandboxProcess) -> bool:
        assert process.started is not None
        try:
            data = await self._session.read(f"{process.started.folder}/{process.slot}.code")
        except FileMissing:
            return False
        code = read_exit_code(data)
        if code is None or process.ended:
            return False
        # the sizes of the look may be older than the command's last output
        await self._pass_output(process, await self._sizes(process))
        self._end(process, code)
        return True

    async def _sizes(self, process: SandboxProcess) -> dict[str, int]:
        """The sizes of the files in the folder of a command, by their names."""
        assert process.started is not None
        entries = await self._session.listing(process.started.folder, depth=1)
        return {entry.name: entry.size for entry in entries}

    async def _pass_output(self, process: SandboxProcess, sizes: Mapping[str, int]) -> None:
        """Passes on what the files of a command had when these sizes were read."""
        assert process.started is not None
        for stream, name in enumerate(("out", "err")):
            path = f"{process.started.folder}/{process.slot}.{name}"
            while (left := sizes.get(f"{process.slot}.{name}", 0) - process.taken[stream]) > 0:
                try:
                    data = await self._session.read(path, process.taken[stream], min(left, PIECE))
                except FileMissing:
                    break
                if not data:
                    break  # it has been made shorter
                process.taken[stream] += len(data)
                process.output(f"std{name}", data)

    def _end(self, process: SandboxProcess, code: int, error: str = "") -> None:
        self._followed.pop(process.slot, None)
        process.end(code, error)
        self._forget(process)
