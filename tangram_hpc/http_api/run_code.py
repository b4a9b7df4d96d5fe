"""SandboxFusion's `POST /run_code`: one program, run once, with its output.

The wire is that of ByteDance's SandboxFusion server, which verl's reward function, tools and code
clients call. The client gives up `compile_timeout + run_timeout + 10` seconds after its request,
and waiting for cores counts in that time. Of all answers it tries only 504 again, and takes
everything else for a verdict on the program. So a program that cannot end in time is cancelled and
answered with 504 before its client gives up, and a server that cannot run it now says 504 as well.
Programs wait in this process until it is their turn (`program_queue`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import HTTPException

from .. import (
    ActionFailed,
    ActionState,
    BrokerUnreachable,
    Client,
    ExecResult,
    Future,
    InfeasibleRequest,
    InvalidInput,
    Session,
    SessionLost,
    StoreFailed,
)
from .awaited import GivenUp, awaited
from .code_wire import CommandRunResult, RunCodeRequest, RunCodeResponse
from .compiled import Compiled, CompiledPrograms
from .languages import LANGUAGES, Language
from .program_queue import AdmittedProgram, ProgramQueue, TooLate

SLACK_S = 10.0  # what clients wait beyond the two time limits of their request
MARGIN_S = 5.0  # so much of it is left for the answer's way back, on an overloaded machine as well
BYTES_MAX = 64 << 20  # of one program's files, decoded
BUSY = "no cores were free in time; try again"


class CodeRunner:
    """Runs programs as actions of one client.

    Args:
        client: the client that submits them.
        image: the image of the sandboxes; empty for the node's own programs.
    """

    def __init__(self, client: Client, image: str = "") -> None:
        self._client, self._image = client, image
        self._compiled = CompiledPrograms()
        self._queue = ProgramQueue()

    async def run(self, request: RunCodeRequest,
                  gone: Callable[[], Awaitable[object]]) -> RunCodeResponse:
        """Runs one program.

        Args:
            request: the program.
            gone: returns when the client has hung up; the program is cancelled then.

        Raises:
            HTTPException: 504, if the program cannot end before its client gives up.
        """
        due = time.monotonic() + request.compile_timeout + request.run_timeout + SLACK_S - MARGIN_S
        try:
            return await awaited(self._when_admitted(request, due), gone, due - time.monotonic())
        except (GivenUp, TooLate):
            raise HTTPException(504, BUSY) from None
        # the program itself is not to blame
        except (BrokerUnreachable, ActionFailed, StoreFailed) as error:
            raise HTTPException(504, str(error)) from None

    async def _when_admitted(self, request: RunCodeRequest, due: float) -> RunCodeResponse:
        longest_s = request.compile_timeout + request.run_timeout
        async with self._queue.admitted(due, longest_s) as program:
            return await self._run(request, program)

    async def _run(self, request: RunCodeRequest, program: AdmittedProgram) -> RunCodeResponse:
        language = LANGUAGES[request.language]
        compiled = Compiled()
        try:
            if language.compile:
                compiled = await self._compiled.get(
                    (request.language, str(request.compile_timeout), _digest(request.files),
                     request.code), lambda: self._compile(language, request, program))
                if not compiled.product:
                    return _answer(compiled.result, None, {})
            result, files = await self._execute(language, request, compiled.product, program)
        except (InvalidInput, InfeasibleRequest) as error:
            failed = CommandRunResult(status="Error", stderr=str(error))
            return _answer(compiled.result, failed, {})
        return _answer(compiled.result, result, files)

    async def _execute(self, language: Language, request: RunCodeRequest, product: bytes,
                       program: AdmittedProgram) -> tuple[CommandRunResult, dict[str, str]]:
        files, argv = request.contents(), list(language.run)
        if product:
            files[language.product] = product
            argv = ["sh", "-c", f'chmod 700 {language.product} && exec "$@"', "sh", *argv]
        else:
            files[language.source] = request.code.encode()
        _check_size(files)
        mem = max(0, request.memory_limit_MB)
        name, stdin = f"run_code.{request.language}", (request.stdin or "").encode()
        if not request.fetch_files and not self._image:
            future = self._client.submit(argv, files=files, stdin=stdin, mem=mem, name=name,
                                         timeout=request.run_timeout)
            return await _result(future, program), {}
        async with self._session(mem) as session:
            future = session.exec(argv, files=files, stdin=stdin, name=name,
                                  timeout=request.run_timeout)
            result = await _result(future, program)
            return result, await _fetched(session, request.fetch_files)

    async def _compile(self, language: Language, request: RunCodeRequest, program: AdmittedProgram
                       ) -> Compiled:
        files = {**request.contents(), language.source: request.code.encode()}
        _check_size(files)
        async with self._session(0) as session:
            future = session.exec(list(language.compile), name=f"compile.{request.language}",
                                  files=files,
                                  timeout=request.compile_timeout, retries=2)
            result = await _result(future, program)
            if result.return_code != 0 or result.status != "Finished":
                # a compiler that was killed may end otherwise the next time
                return Compiled(result, b"", keep=(result.return_code or 0) > 0)
            return Compiled(result, await _ended(session.read(language.product)))

    def _session(self, mem: int) -> Session:
        return self._client.session(mem=mem, image=self._image, name="run_code")


def _check_size(files: Mapping[str, bytes]) -> None:
    """Raises InvalidInput if the files of a program hold more bytes than they may."""
    if sum(map(len, files.values())) > BYTES_MAX:
        raise InvalidInput(f"files: they hold more than {BYTES_MAX >> 20} MiB")


def _digest(files: Mapping[str, str | None]) -> str:
    """Returns a text that differs for different files beside a program; empty without files."""
    told = json.dumps(sorted(files.items())).encode()
    return hashlib.sha256(told).hexdigest() if files else ""


async def _ended(future: Future) -> Any:
    """Waits for an action; cancels it if the waiting task is cancelled."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.cancel()
        raise


async def _fetched(session: Session, paths: list[str]) -> dict[str, str]:
    """Reads those of the files that exist.

    Raises:
        InvalidInput: they hold more than an answer may.
    """
    found: dict[str, str] = {}
    left = BYTES_MAX
    for path in paths:
        try:
            data = await _ended(session.read(path, length=left + 1))
        except SessionLost:
            raise
        except ActionFailed:
            continue  # the program has not made this file
        left -= len(data)
        if left < 0:
            raise InvalidInput(f"fetch_files: they hold more than {BYTES_MAX >> 20} MiB")
        found[path] = base64.b64encode(data).decode()
    return found


async def _result(future: Future, program: AdmittedProgram) -> CommandRunResult:
    result = await _ended(future)
    program.note(future)
    assert isinstance(result, ExecResult)
    seconds = future.details.exec_s if future.details is not None else None
    out, err = result.text, result.stderr.decode(errors="replace")
    if any(result.cut):
        left_out = (f"{result.cut[0]} bytes of stdout and {result.cut[1]} bytes of stderr were "
                    "left out")
        err = f"{err}\n{left_out}" if err else left_out
    if result.state is ActionState.TIMEOUT:
        return CommandRunResult(status="TimeLimitExceeded", execution_time=seconds, stdout=out,
                                stderr=err)
    if result.reason.startswith("argv: "):  # the sandbox could not start it
        return CommandRunResult(status="Error", stdout=out, stderr=result.reason)
    if result.reason:
        err = f"{err}\n{result.reason}".lstrip()
    return CommandRunResult(status="Finished", execution_time=seconds,
                            return_code=result.returncode, stdout=out, stderr=err)


def _answer(compiled: CommandRunResult | None, run: CommandRunResult | None,
            files: dict[str, str]) -> RunCodeResponse:
    """Sums both parts up, by SandboxFusion's rule: an error of the sandbox goes before a failure of
    the program."""
    parts = [part for part in (compiled, run) if part is not None]
    for part in parts:
        if part.status == "Error":
            return RunCodeResponse(status="SandboxError", message=part.stderr or "",
                                   compile_result=compiled, run_result=run)
    failed = any(part.status != "Finished" or part.return_code for part in parts)
    return RunCodeResponse(status="Failed" if failed else "Success", compile_result=compiled,
                           run_result=run, files=files)
