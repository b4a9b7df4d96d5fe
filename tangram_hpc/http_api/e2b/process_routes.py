"""The service `process.Process` of a sandbox: starting commands and terminals, and following them.

The requests are calls of the Connect protocol (`connect_protocol`). A command goes on when the
stream of its events is cut, and a client can connect to it again; its timeout ends it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .connect_protocol import (
    STREAM_JSON,
    envelope,
    error_answer,
    last_envelope,
    read_envelopes,
    read_object,
    streams,
    timeout_s,
)
from .running_command import CommandConfig, EventListener, SandboxProcess
from .sandboxes import Sandbox
from .terminals import SandboxTerminal
from .wire_errors import RpcError

PING_S = 50.0  # between two keepalive events, unless the client asks for another time
SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL,
           15: signal.SIGTERM, 9: signal.SIGKILL}
CHUNK = 1 << 16  # a chunk of a stream with so many bytes takes no further event
TEXT_MAX = 128 << 10  # the most bytes of a program, an argument or a variable, as in the kernel
router = APIRouter(prefix="/process.Process", include_in_schema=False)


@router.post("/Start")
async def start(request: Request) -> Response:
    """Starts a command or a terminal; the answer is the stream of its events."""
    message = await _stream_message(request)
    config = _config(message, _user(request.headers))
    limit = timeout_s(request.headers)
    processes = _sandbox(request).processes
    if isinstance(message.get("pty"), dict):
        rows, cols = _size(message["pty"])
        process, listener = await processes.open_terminal(config, rows, cols, limit)
    else:
        process, listener = await processes.start(config, message.get("stdin", True) is True, limit)
    await asyncio.sleep(0)  # the end of a short command has come together with its start
    return await _stream(process, listener, request)


@router.post("/Connect")
async def connect(request: Request) -> Response:
    """Follows a running command or terminal from now on."""
    message = await _stream_message(request)
    process = _sandbox(request).processes.get(message.get("process"))
    return await _stream(process, process.listen(), request)


@router.post("/List")
async def list_processes(request: Request) -> JSONResponse:
    """Lists the commands and terminals that run."""
    read_object(await request.body())
    told = []
    for process in _sandbox(request).processes.all():
        if not process.config.listed:
            continue
        one = {"config": process.config.told(), "pid": process.pid}
        told.append({**one, "tag": process.config.tag} if process.config.tag else one)
    return JSONResponse({"processes": told})


@router.post("/SendSignal")
async def send_signal(request: Request) -> JSONResponse:
    """Sends SIGTERM or SIGKILL to a command."""
    message = read_object(await request.body())
    number = message.get("signal")
    if not isinstance(number, str | int) or number not in SIGNALS:
        raise RpcError("invalid_argument", f"signal: {number!r:.40} is neither SIGNAL_SIGTERM nor "
                                           "SIGNAL_SIGKILL")
    processes = _sandbox(request).processes
    await processes.signal(processes.get(message.get("process")), SIGNALS[number])
    return JSONResponse({})


@router.post("/SendInput")
async def send_input(request: Request) -> JSONResponse:
    """Sends input to a command or a terminal."""
    message = read_object(await request.body())
    processes = _sandbox(request).processes
    process = processes.get(message.get("process"))
    await processes.send_input(process, *_input(message.get("input")))
    return JSONResponse({})


@router.post("/StreamInput")
async def stream_input(request: Request) -> StreamingResponse:
    """Sends the input of a stream to a command or a terminal, once the whole stream was
    received."""
    processes = _sandbox(request).processes
    process = None
    for message in read_envelopes(await request.body()):
        if isinstance(message.get("start"), dict):
            process = processes.get(message["start"].get("process"))
        elif isinstance(message.get("data"), dict):
            if process is None:
                raise RpcError("invalid_argument", "the first message must be `start`")
            await processes.send_input(process, *_input(message["data"].get("input")))
    return StreamingResponse(iter([envelope({}), last_envelope()]), media_type=STREAM_JSON)


@router.post("/CloseStdin")
async def close_stdin(request: Request) -> JSONResponse:
    """Ends a command's input."""
    message = read_object(await request.body())
    processes = _sandbox(request).processes
    await processes.close_input(processes.get(message.get("process")))
    return JSONResponse({})


@router.post("/Update")
async def update(request: Request) -> JSONResponse:
    """Changes the size of a terminal."""
    message = read_object(await request.body())
    process = _sandbox(request).processes.get(message.get("process"))
    if not isinstance(process, SandboxTerminal):
        raise RpcError("failed_precondition", f"process {process.pid} has no terminal")
    process.resize(*_size(message.get("pty")))
    return JSONResponse({})


def direct(app: ASGIApp) -> ASGIApp:
    """Returns an application that calls this module's routes itself and hands every other request
    to `app`. FastAPI's way to a route takes a quarter of this server's time for a short command."""
    endpoints = {route.path: route.endpoint for route in router.routes
                 if isinstance(route, APIRoute)}

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"]) if scope.get("method") == "POST" else None
        if endpoint is None:
            return await app(scope, receive, send)
        try:
            answer = await endpoint(Request(scope, receive, send))
        except RpcError as error:
            answer = error_answer(error, Headers(scope=scope))
        await answer(scope, receive, send)

    return serve


# ---- streams ------------------------------------------------------------------------------------


async def _stream_message(request: Request) -> dict[str, Any]:
    """Returns the only message that a client sends in a call whose answer is a stream."""
    if not streams(request.headers):
        raise RpcError("invalid_argument", f"Content-Type: send {STREAM_JSON}")
    messages = read_envelopes(await request.body())
    if len(messages) != 1:
        raise RpcError("invalid_argument", f"{len(messages)} messages came; the call has one")
    return messages[0]


async def _stream(process: SandboxProcess, listener: EventListener, request: Request) -> Response:
    """Returns the stream of a process's events. If it has ended, that is one body, which costs less
    than a chunk for each event."""
    ping = request.headers.get("keepalive-ping-interval", "")
    ping_s = min(max(float(ping), 1.0), 300.0) if ping.isascii() and ping.isdigit() else PING_S
    chunks = _events(process, listener, ping_s)
    if process.ended:
        return Response(b"".join([chunk async for chunk in chunks]), media_type=STREAM_JSON)
    return StreamingResponse(chunks, media_type=STREAM_JSON)


async def _events(process: SandboxProcess, listener: EventListener, ping_s: float
                  ) -> AsyncIterator[bytes]:
    """Yields the envelopes of a process's events; those that wait together are one chunk."""
    chunk = envelope({"event": {"start": {"pid": process.pid}}})
    try:
        while True:
            if chunk and (len(chunk) > CHUNK or not listener.has_events):
                yield chunk
                chunk = b""
            try:
                event = (await listener.get() if listener.has_events else
                         await asyncio.wait_for(listener.get(), ping_s))
            except asyncio.TimeoutError:
                event = {"keepalive": {}}
            if event is None:
                break
            chunk += envelope({"event": event})
        yield chunk + last_envelope()
    except RpcError as error:
        yield chunk + last_envelope(error)
    finally:
        process.unlisten(listener)


# ---- fields -------------------------------------------------------------------------------------


def _sandbox(request: Request) -> Sandbox:
    sandbox = request.scope["state"]["sandbox"]
    assert isinstance(sandbox, Sandbox)
    return sandbox


def _user(headers: Mapping[str, str]) -> str:
    """Returns the user of `Authorization: Basic base64("USER:")`; empty if there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("unauthenticated", "Authorization: the user is not base64") from None


def _config(message: Mapping[str, Any], user: str) -> CommandConfig:
    told = message.get("process")
    told = told if isinstance(told, dict) else {}
    args, envs = told.get("args", []), told.get("envs", {})
    if not isinstance(args, list) or not isinstance(envs, dict):
        raise RpcError("invalid_argument", "process: args is a list, and envs an object")
    tag = message.get("tag") or ""
    for text in (told.get("cmd"), told.get("cwd") or "", tag, *args, *envs, *envs.values()):
        if not isinstance(text, str) or "\0" in text or len(text) > TEXT_MAX or not _is_utf8(text):
            raise RpcError("invalid_argument", "process: cmd, args, envs, cwd and tag are texts of "
                                               f"at most {TEXT_MAX} characters without null bytes")
    if not told["cmd"]:
        raise RpcError("invalid_argument", "process: cmd is empty")
    return CommandConfig(told["cmd"], tuple(args), dict(envs), told.get("cwd") or "", tag, user)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _size(pty: Any) -> tuple[int, int]:
    size = pty.get("size") if isinstance(pty, dict) else None
    rows, cols = (size.get("rows"), size.get("cols")) if isinstance(size, dict) else (None, None)
    if type(rows) is not int or type(cols) is not int:
        raise RpcError("invalid_argument", "pty: size needs rows and cols, as whole numbers")
    return rows, cols


def _input(told: Any) -> tuple[str, bytes]:
    """Returns the kind and the bytes of a `process.ProcessInput`."""
    if isinstance(told, dict):
        for kind in ("stdin", "pty"):
            if isinstance(told.get(kind), str):
                try:
                    return kind, base64.b64decode(told[kind], validate=True)
                except (binascii.Error, ValueError):
                    break
    raise RpcError("invalid_argument", "input: send stdin or pty, in base64")
