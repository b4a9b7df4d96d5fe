"""The port of E2B's `run_code`: code and contexts of the packages `e2b-code-interpreter`.

A call is a command of the sandbox that makes one call of `python_kernel`, whose lines are the
answer. So it has its CPUs, its limits and its record like any command, and another request for the
sandbox sends it to the background. When its client goes away, its code is interrupted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from ... import ExecResult
from ..e2b.processes import Processes
from ..e2b.running_command import CommandConfig, EventListener, SandboxProcess
from ..e2b.sandboxes import Sandbox
from ..e2b.wire_errors import ApiError, RpcError
from .python_kernel import DEFAULT, REFUSED, UNKNOWN

PROGRAM = Path(__file__).with_name("python_kernel.py").read_text()
PART = 1 << 16  # characters of an argument; the kernel permits 128 KiB
CODE_MAX = 1 << 20  # characters of JSON of one call, which are arguments of one command
CONTEXT_S = 10.0  # the longest time to make, list or end contexts
LANGUAGES = (None, "", "python", "python3")
_NOT_FOUND = 127  # the exit status for a program that is not there
router = APIRouter(include_in_schema=False)


class CodeCall(BaseModel):
    """The body of a call; the fields are E2B's."""

    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class NewContext(BaseModel):
    """The body that asks for a context; the fields are E2B's."""

    language: str | None = None
    cwd: str | None = None


@router.post("/execute")
async def execute(call: CodeCall, request: Request) -> Response:
    """Runs code in a context; the answer is a line of JSON for each event."""
    _check_language(call.language)
    text = json.dumps({"code": call.code, "envs": call.env_vars or {}})
    if len(text) > CODE_MAX:
        raise ApiError(413, f"code: it has more than {CODE_MAX} characters as JSON; write it to a "
                            "file of the sandbox, and run that")
    parts = [text[at:at + PART] for at in range(0, len(text), PART)]
    processes = _sandbox(request).processes
    process, listener = await processes.start(
        CommandConfig("python3", ("-c", PROGRAM, "run", _id(call.context_id or DEFAULT), *parts),
                      listed=False), False, None)
    lines = _lines(processes, process, listener)
    return StreamingResponse(_after(await anext(lines), lines), media_type="application/json")


@router.get("/contexts")
async def contexts(request: Request) -> JSONResponse:
    """Lists the contexts."""
    return JSONResponse(json.loads(await _ask(request, "list")))


@router.post("/contexts")
async def make_context(wanted: NewContext, request: Request) -> JSONResponse:
    """Makes a context."""
    _check_language(wanted.language)
    number = base64.b32encode(os.urandom(15)).decode().lower()
    return JSONResponse(json.loads(await _ask(request, "make", number, wanted.cwd or ".")))


@router.delete("/contexts/{number}")
async def drop_context(number: str, request: Request) -> Response:
    """Ends a context."""
    await _ask(request, "drop", _id(number))
    return Response(status_code=204)


@router.post("/contexts/{number}/restart")
async def restart_context(number: str, request: Request) -> Response:
    """Ends the interpreter of a context; the next call begins with a new one."""
    await _ask(request, "restart", _id(number))
    return Response(status_code=204)


# ---- the command of a call ----------------------------------------------------------------------


async def _lines(processes: Processes, process: SandboxProcess, listener: EventListener
                 ) -> AsyncIterator[bytes]:
    """Yields whole lines of what the call prints, one at least.

    Raises:
        ApiError: it has ended without a line, so it was not begun.
        RpcError: the same, as its sandbox or its worker has ended.
    """
    held: list[bytes] = []  # the pieces of a line that has not ended
    said, begun = b"", False
    end: dict[str, Any] = {"exitCode": 0, "status": ""}
    try:
        while (event := await listener.get()) is not None:
            data = event.get("data", {})
            end = event.get("end", end)
            said = (said + base64.b64decode(data.get("stderr", "")))[:4096]
            whole, newline, rest = base64.b64decode(data.get("stdout", "")).rpartition(b"\n")
            if newline:
                begun = True
                yield b"".join((*held, whole, newline))
                held = []
            held.append(rest)
        if not begun:
            raise _refusal(end["exitCode"], said.decode(errors="replace").strip())
        if end["exitCode"] or said:  # as after a kill, or where output was dropped
            yield _failed(said.decode(errors="replace").strip() or end["status"])
    except RpcError as error:
        if not begun:
            raise
        yield _failed(error.message)
    finally:
        process.unlisten(listener)
        processes.give_up(process)


def _failed(why: str) -> bytes:
    error = {"type": "error", "name": "CallFailed", "value": why, "traceback": ""}
    return json.dumps(error).encode() + b"\n"


async def _after(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for line in lines:
        yield line


async def _ask(request: Request, *words: str) -> str:
    """Runs the program for one of its other verbs; returns what it prints."""
    async with _sandbox(request).processes.quiet() as session:
        result = await asyncio.wrap_future(session.exec(
            ["python3", "-c", PROGRAM, *words], name="run_code", timeout=CONTEXT_S))
    assert isinstance(result, ExecResult)
    if result.exit_code:
        raise _refusal(result.exit_code, result.stderr.decode(errors="replace").strip())
    return str(result.text)


def _refusal(code: int, said: str) -> ApiError:
    if code == UNKNOWN:
        return ApiError(404, "context: there is no such context in this sandbox")
    if code == REFUSED:
        return ApiError(400, said)
    if code == _NOT_FOUND:
        return ApiError(501, "run_code: this sandbox has no python3; use an image with Python 3.8 "
                             "or later, or commands.run")
    return ApiError(500, f"run_code: python3 ended with {code} ({said[-300:] or 'without a word'})")


# ---- fields -------------------------------------------------------------------------------------


def _sandbox(request: Request) -> Sandbox:
    sandbox: Any = request.scope["state"].get("sandbox")
    if not isinstance(sandbox, Sandbox):
        raise ApiError(404, "name the sandbox in E2b-Sandbox-Id, and the port 49999 in "
                            "E2b-Sandbox-Port")
    return sandbox


def _check_language(language: str | None) -> None:
    if language not in LANGUAGES:
        raise ApiError(501, f"language: {language!r:.40} is not served, Python alone is; run other "
                            "programs by commands.run")


def _id(number: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]{1,64}", number):
        raise _refusal(UNKNOWN, "")
    return number
