"""The commands that run in one sandbox.

Each command begins as an action of the sandbox's session (`started_command`). The session runs one
action at a time, so every other request makes room first: the running command has `GRACE_S` to end
by itself, and then goes to the background, where it is followed by the files that it writes
(`following`).

All methods are for the event loop; the job's client calls back on its own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from ... import ActionState, ExecResult, FileMissing, Future, Session, TangramError
from .following import Follower
from .running_command import CommandConfig, EventListener, SandboxProcess
from .started_command import KILLED, LET_GO, name_of, read_first_line
from .terminals import SandboxTerminal, numbers
from .wire_errors import RpcError, as_rpc_error, gone

GRACE_S = 0.05  # a command that ends within this time is not sent to the background
AGAIN_S = 1.0  # after this time `LET_GO` is sent again to a command that is still in the foreground
OUTPUT_MAX = 64 << 20  # bytes of stdout and of stderr while a command is in the foreground
LINE_MAX = 4096  # of a command's first line, which is its action's own
INPUT_S = 10.0  # the longest wait for a command to read its input
OWN_USERS = ("", "user")  # E2B's default user, which is the sandbox's own
TERMINALS_MAX = 32


class Processes:
    """The commands and terminals of one sandbox.

    Args:
        session: the sandbox's session.
        cpus: the fewest and the most CPUs of each command.
        image: whether the session has an image, and therefore users of its own.
    """

    def __init__(self, session: Session, cpus: tuple[int, int], image: bool) -> None:
        self._session, self._cpus, self._image = session, cpus, image
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, SandboxProcess] = {}  # by process id
        self._front: SandboxProcess | None = None  # the process whose action waits or runs
        self._home = ""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._terminals: set[SandboxTerminal] = set()  # whose threads may still call the loop
        self._follower = Follower(session, self._forget)

    # ---- for other requests ----

    async def make_room(self) -> None:
        """Returns when the session is free for an action. A command that runs for longer than
        `GRACE_S` is sent to the background; for the end of a terminal this call waits."""
        async with self._turn:
            await self._make_room()

    async def _make_room(self) -> None:
        front = self._front
        if front is None:
            return
        await front.ready.wait()
        wait_s = GRACE_S
        while not front.left.is_set():
            try:
                await asyncio.wait_for(front.left.wait(), wait_s)
            except asyncio.TimeoutError:
                if front.started is not None:
                    front.future.interrupt(LET_GO)
                wait_s = AGAIN_S

    # ---- starting ----

    async def start(self, config: CommandConfig, reads_input: bool, timeout_s: float | None
                    ) -> tuple[SandboxProcess, EventListener]:
        """Starts a command; returns when it has started, which may take until CPUs are free.

        Args:
            config: the command.
            reads_input: whether clients will send it input.
            timeout_s: the time after which the command is ended, waiting for CPUs included, in
                seconds; None for no limit.

        Returns:
            The command, and a listener that hears it from its beginning.

        Raises:
            RpcError: it cannot be started.
        """
        async with self._turn:
            await self._make_room()
            process = SandboxProcess(config, reads_input)
            listener = process.listen()
            try:
                process.future = self._submit(process, timeout_s)
            except TangramError as error:
                raise self._told(error) from None
            self._front = process
        process.future.add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._left, process, future))
        if timeout_s is not None:
            process.timer = self._loop.call_later(timeout_s, self._overdue, process)
        await process.ready.wait()
        if process.failure is not None:
            raise process.failure
        return process, listener

    def _told(self, error: TangramError) -> RpcError:
        return as_rpc_error(error, self._session.name.removeprefix("e2b-"))

    def _overdue(self, process: SandboxProcess) -> None:
        """Ends a command whose time is over, wherever it runs."""
        if process.ended:
            return
        process.fail(RpcError("deadline_exceeded", "the command ran into its timeout"))
        process.future.cancel()
        if process.detached:
            self._kill_soon(process)

    def _kill_soon(self, process: SandboxProcess) -> None:
        """Begins to kill a command that runs in the background and counts as ended."""
        self._begin(self._kill(process))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop itself keeps no reference to its tasks
        task.add_done_callback(self._tasks.discard)

    def give_up(self, process: SandboxProcess) -> None:
        """Begins to end a command whose client has gone. What it has left in the background stays,
        which a cancelled command would take along.
        """
        async def end() -> None:
            with contextlib.suppress(RpcError):
                await self.signal(process, signal.SIGTERM)

        if not process.ended:
            self._begin(end())

    async def _kill(self, process: SandboxProcess) -> None:
        assert process.started is not None
        self._follower.forget(process)
        with contextlib.suppress(RpcError):
            await self.make_room()
            await self._aside(f"kill -s KILL -- -{process.started.pid}")
            await self._follower.remove_files(process)
        self._forget(process)

    def _submit(self, process: SandboxProcess, timeout_s: float | None) -> Future:
        config, head = process.config, bytearray()

        def heard(stream: int, data: bytes) -> None:
            self._loop.call_soon_threadsafe(self._heard, process, head, stream, data)

        return self._session.exec_detachable(
            [config.cmd, *config.args], reads_input=process.reads_input, cwd=config.directory,
            env=config.envs, cpus=self._cpus, timeout=timeout_s,
            output_max=min(OUTPUT_MAX, self._session.output_bound),
            on_output=heard, user=self._user(config.user),
            name=name_of([config.cmd, *config.args]))

    def _user(self, user: str) -> str:
        """Returns the user for the session. Without an image all users are the worker's own."""
        return "" if user in OWN_USERS or not self._image else user

    def _heard(self, process: SandboxProcess, head: bytearray, stream: int, data: bytes) -> None:
        """Handles a piece of an action's output; the first line of stdout is not the command's."""
        if stream == 1 and not process.ready.is_set():
            head += data
            line, newline, data = bytes(head).partition(b"\n")
            if not newline and len(line) < LINE_MAX:
                return
            process.started = read_first_line(line)
            if process.started is None:
                return  # the end of the action will tell why the command did not start
            process.pid = process.started.pid
            self._running[process.pid] = process
            process.ready.set()
        process.taken[stream - 1] += len(data)
        process.output("stdout" if stream == 1 else "stderr", data)

    # ---- its end ----

    def _left(self, process: SandboxProcess, future: Future) -> None:
        """Notes that the action of a command has ended. A command that was killed, or whose time
        was over, may have gone to the background just before."""
        if self._front is process:
            self._front = None
        result: Any = None
        try:
            result = future.result()
        except TangramError as error:
            process.fail(self._told(error))
        except concurrent.futures.CancelledError:
            process.end(KILLED, "signal: killed")
        if isinstance(result, ExecResult):
            if result.signal == LET_GO and process.started is not None:
                process.detached = True
                process.left.set()
                return self._kill_soon(process) if process.ended else self._follower.follow(process)
            if not process.ended:
                self._tell_end(process, result)
        self._forget(process)

    def _tell_end(self, process: SandboxProcess, result: ExecResult) -> None:
        if not process.pid:
            return self._tell_not_started(process, result)
        for stream, cut in zip(("stdout", "stderr"), result.cut, strict=True):
            if cut:
                process.output("stderr", f"\n[{cut} bytes of {stream} were dropped]\n".encode())
        if result.state is ActionState.TIMEOUT:
            process.fail(RpcError("deadline_exceeded", "the command ran into its timeout"))
        else:
            process.end(result.exit_code, result.reason)

    def _tell_not_started(self, process: SandboxProcess, result: ExecResult) -> None:
        """Tells why a command was not started. A program that is not there is told as the shell
        tells it: by its exit code and a line of stderr."""
        cwd, why = process.config.cwd, result.reason
        if cwd and why.startswith("cwd: "):
            reason = why.rpartition(": ")[2]
            text = (f"cwd {cwd!r:.200} does not exist" if reason == os.strerror(errno.ENOENT)
                    else f"cwd {cwd!r:.200} cannot be entered: {reason}")
            process.fail(RpcError("invalid_argument", text))
        elif result.exit_code in (126, 127) and why.startswith("argv: "):
            process.pid = next(numbers)
            process.ready.set()
            process.output("stderr", f"{why}\n".encode())
            process.end(result.exit_code)
        else:
            process.fail(RpcError("invalid_argument" if result.exit_code == 126 else "internal",
                                  f"the command could not be started: {why or result.exit_code}"))

    def _forget(self, process: SandboxProcess) -> None:
        """Drops a command that has ended."""
        if self._running.get(process.pid) is process:
            del self._running[process.pid]

    def end_all(self, error: RpcError | None = None) -> None:
        """Ends all streams with an error; None if the sandbox has ended."""
        self._follower.close()
        for process in {*self._running.values(), *([self._front] if self._front else ())}:
            process.fail(error or gone(self._session.name.removeprefix("e2b-")))
        self._running.clear()

    async def settled(self) -> None:
        """Returns when no thread of a terminal will call the event loop any more. The job's client
        must have been closed."""
        for terminal in list(self._terminals):
            await terminal.read_to_its_end()

    # ---- terminals ----

    async def open_terminal(self, config: CommandConfig, rows: int, cols: int,
                            timeout_s: float | None) -> tuple[SandboxProcess, EventListener]:
        """Starts a command on a terminal of its own. Other requests of the sandbox wait for its
        end.

        Raises:
            RpcError: it cannot be started.
        """
        terminals = [each for each in self.all() if isinstance(each, SandboxTerminal)]
        if len(terminals) >= TERMINALS_MAX:
            raise RpcError("resource_exhausted", f"the sandbox has {TERMINALS_MAX} terminals")
        async with self._turn:
            await self._make_room()
            try:
                terminal = SandboxTerminal(self._session, config, self._user(config.user),
                                           (rows, cols), self._cpus, timeout_s)
                listener = terminal.listen()
            except TangramError as error:
                raise self._told(error) from None
            self._front = terminal
            self._running[terminal.pid] = terminal
            self._terminals.add(terminal)
        terminal.future.add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(
                terminal.over, self._terminal_left, future))
        return terminal, listener

    def _terminal_left(self, terminal: SandboxTerminal, future: Future) -> None:
        self._terminals.discard(terminal)
        self._left(terminal, future)

    # ---- running commands ----

    def all(self) -> Iterator[SandboxProcess]:
        """Yields the commands and terminals that run."""
        return iter(list(self._running.values()))

    def get(self, selector: Any) -> SandboxProcess:
        """Returns the command that a `process.ProcessSelector` names.

        Raises:
            RpcError: there is no such command.
        """
        pid, tag = (selector.get("pid"), selector.get("tag")) if isinstance(selector, dict) else (
            None, None)
        for process in self._running.values():
            if process.pid == pid or (tag and process.config.tag == tag):
                return process
        raise RpcError("not_found", f"process with pid {pid!r:.20} not found" if tag is None else
                       f"process with tag {tag!r:.40} not found")

    async def signal(self, process: SandboxProcess, number: int) -> None:
        """Sends SIGTERM or SIGKILL to a command with all processes of its group."""
        if isinstance(process, SandboxTerminal):
            return process.close()
        if number == signal.SIGKILL and not process.detached:
            process.future.cancel()
            await process.left.wait()
            if process.ended:
                return  # else it had gone to the background before
        await self.make_room()
        if process.started is not None and not process.ended:
            name = signal.Signals(number).name[3:]
            await self._aside(f"kill -s {name} -- -{process.started.pid}")
            if number == signal.SIGKILL:  # without a wait for its exit code
                await self._follower.killed(process)

    async def send_input(self, process: SandboxProcess, kind: str, data: bytes) -> None:
        """Sends input to a command or a terminal.

        Raises:
            RpcError: it does not read input, or has not read this input in time.
        """
        if isinstance(process, SandboxTerminal):
            await process.write(data)
            return
        if kind != "stdin" or not process.reads_input:
            raise RpcError("failed_precondition",
                           f"process {process.pid} reads no {kind}; start it with stdin=True")
        await self.make_room()
        if process.started is not None:
            await self._aside('cat >"$1"', f"{process.started.path}.in", data=data,
                              user=self._user(process.config.user))

    async def close_input(self, process: SandboxProcess) -> None:
        """Ends a command's input.

        Raises:
            RpcError: the command does not read input.
        """
        if isinstance(process, SandboxTerminal):
            process.hang_up()
            return
        if not process.reads_input:
            raise RpcError("failed_precondition",
                           f"process {process.pid} reads no stdin; start it with stdin=True")
        await self.make_room()
        if process.started is not None:
            try:
                await self._session.remove(f"{process.started.path}.in")
            except FileMissing:
                pass  # it was ended before
            except TangramError as error:
                raise self._told(error) from None

    async def _aside(self, line: str, *arguments: str, data: bytes = b"", user: str = ""
                     ) -> ExecResult:
        """Runs a short shell line in the sandbox on behalf of this module."""
        try:
            result = await asyncio.wrap_future(self._session.exec(
                ["/bin/sh", "-c", line, "sh", *arguments], stdin=data, name="e2b",
                timeout=INPUT_S, user=user))
        except TangramError as error:
            raise self._told(error) from None
        if result.state is ActionState.TIMEOUT:
            raise RpcError("deadline_exceeded", f"the command has not read its input within "
                                                f"{INPUT_S:g} s")
        assert isinstance(result, ExecResult)
        return result

    async def home(self) -> str:
        """Returns the session's directory, as a path of the sandbox."""
        if not self._home:
            await self.make_room()
            self._home = (await self._aside("pwd")).text.strip()
        return self._home

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[Session]:
        """Makes room, and turns the errors of file calls into errors of this wire."""
        await self.make_room()
        try:
            yield self._session
        except TangramError as error:
            raise self._told(error) from error
