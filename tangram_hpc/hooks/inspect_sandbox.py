"""Inspect AI's sandbox `tangram`: each sample of an evaluation has a session of the job's broker.

Inspect finds this module by its entry point; nothing of this package imports it, as it needs the
extra `inspect`. Use `Task(sandbox="tangram")` in a process that can reach a broker (`TANGRAM_JOB`,
`TANGRAM_ACCESS` or a Slurm job), or `("tangram", "tangram-sandbox.json")`, whose keys are the
arguments of `Client.session`. Inspect expects each failure as an exception of a certain type: those
that it knows become the answer to the policy's tool call, and any other one ends the sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inspect_ai.tool import ToolError
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)

import tangram_hpc
from tangram_hpc.errors import FileDenied, FileFailed, FileIsFolder, FileMissing, InvalidInput

from .harness.harness_session import why_unsendable
from .harness.session_options import session_options
from .tool_answers import file_error_text

_RETRIES_S = (60, 30)  # the longest times of a second and a third try after a time-out
_NOT_STARTED = (126, 127)


@sandboxenv(name="tangram")
class TangramSandbox(SandboxEnvironment):
    """One session of a broker, which one sample of an evaluation uses.

    Attributes:
        client: the client of all samples of this process; None before the first task.
        session: the session.
    """

    client: tangram_hpc.Client | None = None

    def __init__(self, session: tangram_hpc.Session) -> None:
        super().__init__()
        self.session = session

    @classmethod
    def config_files(cls) -> list[str]:
        """The files that configure a sandbox, beside the task."""
        return ["tangram-sandbox.json"]

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Connects to the broker, once for this process."""
        if TangramSandbox.client is None:
            TangramSandbox.client = await asyncio.to_thread(tangram_hpc.connect)

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]
                          ) -> dict[str, SandboxEnvironment]:
        """Opens the sample's session and waits for its admission.

        Raises:
            InvalidInput: the file of the configuration is not JSON, or has a wrong key; the message
                names it.
            FileFailed: one of the `files` that it names cannot be written.
        """
        await cls.task_init(task_name, config)
        client = TangramSandbox.client
        assert client is not None
        options = {} if not isinstance(config, str) else session_options(_read(config), config)
        session = client.session(**{"name": task_name[:80], **options})
        try:
            await session.opened
            for each in session.first:
                await each
        except BaseException:  # a sample that is cancelled here is not cleaned up by Inspect
            session.close()
            raise
        return {"default": cls(session)}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any,
                             environments: dict[str, SandboxEnvironment], interrupted: bool
                             ) -> None:
        """Closes the sample's session."""
        for one in environments.values():
            one.as_type(TangramSandbox).session.close()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        """Closes the client, and with it what a sample has left open."""
        client, TangramSandbox.client = TangramSandbox.client, None
        if client is not None:
            await asyncio.to_thread(client.close)

    async def exec(self, cmd: list[str], input: str | bytes | None = None, cwd: str | None = None,
                   env: dict[str, str] | None = None, user: str | None = None,
                   timeout: int | None = None, timeout_retry: bool = True, concurrency: bool = True
                   ) -> ExecResult[str]:
        """Runs a command; see `SandboxEnvironment.exec`. Of long output the end is kept.

        Raises:
            OutputLimitExceededError: Inspect allows more output than can be kept, as it does to
                read the requests of an agent in the sandbox, and the command wrote more than that.
        """
        if why := why_unsendable(*cmd, input):
            raise ToolError(f"the command cannot be run: {why}")
        allowed, most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, self.session.output_bound
        options: dict[str, Any] = {
            "cwd": cwd or "", "env": env, "stdin": input or b"", "keep": "tail",
            "output_max": min(allowed, most)}
        if user is not None:
            if not self.session.spec.image:
                raise SandboxUserUnsupportedError(
                    f"user {user!r}: a session without an image has one user; give it an image")
            options["user"] = user
        tries = [timeout]
        if timeout and timeout_retry:
            tries += [min(timeout, longest) for longest in _RETRIES_S]
        for limit in tries:
            result = await self.session.exec(cmd, timeout=limit, **options)
            if result.state is not tangram_hpc.ActionState.TIMEOUT:
                if allowed > most and any(result.cut):  # half a request would not be read
                    raise OutputLimitExceededError(f"{most / (1 << 20):g} MiB", None)
                return _told(result)
        raise TimeoutError(f"{cmd[0]}: it ran longer than {tries[-1]} s")

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file; see `SandboxEnvironment.write_file`."""
        if why := why_unsendable(contents):
            raise ToolError(f"{file}: nothing was written: {why}")
        with _file_errors():
            await self.session.write(file, contents)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a file; see `SandboxEnvironment.read_file`."""
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data: bytes = b""
        with _file_errors():
            entry = await self.session.stat(file)
            if entry.size <= most:  # the size of a link is that of what it leads to only when read
                data = await self.session.read(file, length=most + 1)
        if max(entry.size, len(data)) > most:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data


@contextlib.contextmanager
def _file_errors() -> Iterator[None]:
    """Raises the failure of a file operation as a type that Inspect gives to the policy, which may
    have chosen the path."""
    try:
        yield
    except FileFailed as error:
        text = file_error_text(error)
        if isinstance(error, FileMissing | FileIsFolder | FileDenied):
            error.args = (text,)
            raise
        if isinstance(error, NotADirectoryError):  # scorers expect one type for a missing file
            raise FileNotFoundError(text) from error
        raise ToolError(text) from error


def _read(config: str) -> Any:
    """What a file of the configuration holds; Inspect's own files of other sandboxes are YAML."""
    try:
        return json.loads(Path(config).read_text())
    except ValueError as error:
        raise InvalidInput(f"{config}: it is not JSON ({error}); write the arguments of "
                           'Client.session as {"mem": "1G"}') from None


def _told(result: tangram_hpc.ExecResult) -> ExecResult[str]:
    """Inspect's result of a command that has ended by itself, or could not be started."""
    stderr = result.stderr.decode(errors="replace")
    if result.exit_code in _NOT_STARTED and result.reason:
        if "Permission denied" in result.reason:
            raise PermissionError(result.reason)
        stderr = stderr or result.reason
    return ExecResult(result.ok, result.exit_code, result.text, stderr)
