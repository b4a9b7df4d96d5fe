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
from .running_command import SandboxProcess
from .started_command import KILLED, read_exit_code
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
        self._followed: dict[int, SandboxProcess] = {}  # by process id
        self._task: asyncio.Task[None] | None = None
        self._fresh = False  # whether a command was added since the last check

    def follow(self, process: SandboxProcess) -> None:
        """Begins to follow a command."""
        self._followed[process.pid] = process
        self._fresh = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def forget(self, process: SandboxProcess) -> None:
        """Stops following a command."""
        self._followed.pop(process.pid, None)

    async def killed(self, process: SandboxProcess) -> None:
        """Passes on the last output of a command that was killed, and its end."""
        if not process.ended:
            with contextlib.suppress(TangramError):
                await self._pass_output(process, await self._sizes(process))
            self._end(process, KILLED, "signal: killed")
        await self.remove_files(process)

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
        for process in list(self._followed.values()):
            assert process.started is not None
            name = process.started.name
            if sizes.get(f"{name}.code", 0):
                moved = await self._pass_end(process) or moved
            elif not process.is_heard:
                process.taken = [sizes.get(f"{name}.out", 0), sizes.get(f"{name}.err", 0)]
            elif (sizes.get(f"{name}.out", 0) > process.taken[0]
                    or sizes.get(f"{name}.err", 0) > process.taken[1]):
                await self._pass_output(process, sizes)
                moved = True
        return moved

    async def _pass_end(self, process: SandboxProcess) -> bool:
        assert process.started is not None
        try:
            data = await self._session.read(f"{process.started.path}.code")
        except FileMissing:
            return False
        code = read_exit_code(data)
        if code is None or process.ended:
            return False
        # the sizes of the look may be older than the command's last output
        await self._pass_output(process, await self._sizes(process))
        self._end(process, code)
        await self.remove_files(process)
        return True

    async def remove_files(self, process: SandboxProcess) -> None:
        """Removes the files of a command that has ended in the background."""
        assert process.started is not None
        for end in ("out", "err", "code", *(["in"] if process.reads_input else [])):
            with contextlib.suppress(TangramError):  # it was removed, or the session has ended
                await self._session.remove(f"{process.started.path}.{end}")

    async def _sizes(self, process: SandboxProcess) -> dict[str, int]:
        """The sizes of the files in the folder of a command, by their names."""
        assert process.started is not None
        entries = await self._session.listing(process.started.folder, depth=1)
        return {entry.name: entry.size for entry in entries}

    async def _pass_output(self, process: SandboxProcess, sizes: Mapping[str, int]) -> None:
        """Passes on what the files of a command had when these sizes were read."""
        assert process.started is not None
        for stream, name in enumerate(("out", "err")):
            path, file = f"{process.started.path}.{name}", f"{process.started.name}.{name}"
            while (left := sizes.get(file, 0) - process.taken[stream]) > 0:
                try:
                    data = await self._session.read(path, process.taken[stream], min(left, PIECE))
                except FileMissing:
                    break
                if not data:
                    break  # it has been made shorter
                process.taken[stream] += len(data)
                process.output(f"std{name}", data)

    def _end(self, process: SandboxProcess, code: int, error: str = "") -> None:
        self._followed.pop(process.pid, None)
        process.end(code, error)
        self._forget(process)
