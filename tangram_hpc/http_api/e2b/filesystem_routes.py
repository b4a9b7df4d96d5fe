"""The service `filesystem.Filesystem` of a sandbox: listing, making, moving and watching files.

Relative paths and `~` begin at the session's directory. A watcher finds changes by comparing two
listings of its folder. A new listing is made when the client asks for events, and every second for
a client that holds a stream open. What happens between two listings is told as one change: a new
file that is not empty was made and written.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from ... import FileMissing, TangramError
from .connect_protocol import (
    STREAM_JSON,
    envelope,
    last_envelope,
    read_envelopes,
    read_object,
    timeout_s,
)
from .entries import entries, entry
from .sandboxes import Sandbox
from .wire_errors import RpcError

WATCH_S = 1.0  # seconds between two listings for a stream
PING_LOOKS = 50  # listings between two keepalive events of a stream
WATCHERS_MAX = 64  # of one sandbox
DEPTH_MAX = 64
PATH_MAX = 4096
router = APIRouter(prefix="/filesystem.Filesystem", include_in_schema=False)


@router.post("/Stat")
async def stat(request: Request) -> JSONResponse:
    """Describes the file at a path."""
    sandbox, message = await _asked(request)
    path = await absolute(sandbox, message.get("path"))
    async with sandbox.processes.quiet() as session:
        return JSONResponse({"entry": await entry(session, path)})


@router.post("/ListDir")
async def list_dir(request: Request) -> JSONResponse:
    """Lists a folder."""
    sandbox, message = await _asked(request)
    path, depth = await absolute(sandbox, message.get("path")), message.get("depth", 1) or 1
    if type(depth) is not int or not 0 < depth <= DEPTH_MAX:
        raise RpcError("invalid_argument", f"depth: {depth!r:.20} is not from 1 to {DEPTH_MAX}")
    async with sandbox.processes.quiet() as session:
        found = await entries(session, path, depth)
    if found is None:
        raise RpcError("invalid_argument", f"path: {path!r:.200} is not a directory")
    return JSONResponse({"entries": found})


@router.post("/MakeDir")
async def make_dir(request: Request) -> JSONResponse:
    """Makes a folder and its missing parents."""
    sandbox, message = await _asked(request)
    path = await absolute(sandbox, message.get("path"))
    async with sandbox.processes.quiet() as session:
        try:
            there = await session.stat(path)
        except FileMissing:
            await session.mkdir(path)
            return JSONResponse({"entry": await entry(session, path)})
    kind = "directory" if there.kind == "dir" else "file"
    raise RpcError("already_exists" if kind == "directory" else "invalid_argument",
                   f"path: there is a {kind} at {path!r:.200}")


@router.post("/Move")
async def move(request: Request) -> JSONResponse:
    """Moves a file or a folder to another path."""
    sandbox, message = await _asked(request)
    source = await absolute(sandbox, message.get("source"))
    target = await absolute(sandbox, message.get("destination"))
    async with sandbox.processes.quiet() as session:
        await session.move(source, target)
        return JSONResponse({"entry": await entry(session, target)})


@router.post("/Remove")
async def remove(request: Request) -> JSONResponse:
    """Removes a file or a folder; it is no error if nothing is at the path."""
    sandbox, message = await _asked(request)
    path = await absolute(sandbox, message.get("path"))
    async with sandbox.processes.quiet() as session:
        try:
            await session.remove(path)
        except FileMissing:
            pass
    return JSONResponse({})


# ---- watching -----------------------------------------------------------------------------------


@dataclass
class Watcher:
    """A folder that a client watches.

    Attributes:
        path: the folder.
        depth: how many levels of the folder are watched; 0 for all.
        seen: kind, size, time of change and mode of each entry at the last listing, by name.
    """

    path: str
    depth: int
    seen: dict[str, Any] = field(default_factory=dict)

    async def look(self, sandbox: Sandbox) -> list[dict[str, Any]]:
        """Lists the folder again; returns the events since the last listing."""
        found = await sandbox.session.listing(self.path, depth=self.depth)
        if len(found) == 1 and not found[0].name:
            raise RpcError("invalid_argument", f"path: {self.path!r:.200} is not a directory")
        now = {each.name: (each.kind, each.size, each.mtime_ns, each.mode) for each in found}
        events = [_event(name, "REMOVE") for name in self.seen if name not in now]
        for name, (kind, size, when, mode) in now.items():
            before = self.seen.get(name)
            if before is None:
                events.append(_event(name, "CREATE"))
                if kind == "file" and size:
                    events.append(_event(name, "WRITE"))
            elif kind == "file" and before[1:3] != (size, when):
                events.append(_event(name, "WRITE"))
            elif before[3] != mode:
                events.append(_event(name, "CHMOD"))
        self.seen = now
        return events


def _event(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": f"EVENT_TYPE_{kind}"}


@router.post("/CreateWatcher")
async def create_watcher(request: Request) -> JSONResponse:
    """Begins to watch a folder; the client will ask for the events."""
    sandbox, message = await _asked(request)
    if len(sandbox.watchers) >= WATCHERS_MAX:
        raise RpcError("resource_exhausted", f"the sandbox has {WATCHERS_MAX} watchers")
    number = secrets.token_hex(8)
    sandbox.watchers[number] = await _watcher(sandbox, message)
    return JSONResponse({"watcherId": number})


@router.post("/GetWatcherEvents")
async def get_watcher_events(request: Request) -> JSONResponse:
    """Answers with the events of a watched folder since the last call."""
    sandbox, message = await _asked(request)
    watcher = sandbox.watchers.get(str(message.get("watcherId")))
    if watcher is None:
        raise RpcError("not_found", "watcherId: there is no such watcher")
    async with sandbox.processes.quiet():
        return JSONResponse({"events": await watcher.look(sandbox)})


@router.post("/RemoveWatcher")
async def remove_watcher(request: Request) -> JSONResponse:
    """Stops watching a folder."""
    sandbox, message = await _asked(request)
    if sandbox.watchers.pop(str(message.get("watcherId")), None) is None:
        raise RpcError("not_found", "watcherId: there is no such watcher")
    return JSONResponse({})


@router.post("/WatchDir")
async def watch_dir(request: Request) -> StreamingResponse:
    """Watches a folder; the answer is the stream of its events."""
    messages = read_envelopes(await request.body())
    sandbox: Sandbox = request.scope["state"]["sandbox"]
    watcher = await _watcher(sandbox, messages[0] if messages else {})
    return StreamingResponse(_watched(sandbox, watcher, timeout_s(request.headers)),
                             media_type=STREAM_JSON)


async def _watched(sandbox: Sandbox, watcher: Watcher, limit_s: float | None
                   ) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    until = None if limit_s is None else loop.time() + limit_s
    yield envelope({"start": {}})
    looks = 0
    try:
        while until is None or loop.time() < until:
            await asyncio.sleep(WATCH_S)
            if sandbox.failure is not None:
                raise sandbox.failure
            looks += 1
            for event in await watcher.look(sandbox):
                yield envelope({"filesystem": event})
            if looks % PING_LOOKS == 0:
                yield envelope({"keepalive": {}})
        yield last_envelope(RpcError("deadline_exceeded", "the time of this stream is over"))
    except RpcError as error:
        yield last_envelope(error)
    except TangramError as error:
        yield last_envelope(sandbox.told(error))


async def _watcher(sandbox: Sandbox, message: dict[str, Any]) -> Watcher:
    path = await absolute(sandbox, message.get("path"))
    watcher = Watcher(path, 0 if message.get("recursive") is True else 1)
    async with sandbox.processes.quiet():
        await watcher.look(sandbox)
    return watcher


# ---- fields -------------------------------------------------------------------------------------


async def _asked(request: Request) -> tuple[Sandbox, dict[str, Any]]:
    sandbox = request.scope["state"]["sandbox"]
    assert isinstance(sandbox, Sandbox)
    return sandbox, read_object(await request.body())


async def absolute(sandbox: Sandbox, path: Any) -> str:
    """Returns a client's path as an absolute path of the sandbox.

    Raises:
        RpcError: it is not a path.
    """
    if not isinstance(path, str) or not path or "\0" in path or len(path) > PATH_MAX:
        raise RpcError("invalid_argument", f"path: {path!r:.60} is not a path of 1 to {PATH_MAX} "
                                           "characters")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise RpcError("invalid_argument", "path: it is not UTF-8") from None
    if path.startswith("/"):
        return path
    home = await sandbox.processes.home()
    rest = path[1:].lstrip("/") if path == "~" or path.startswith("~/") else path
    return f"{home}/{rest}".rstrip("/") if rest != "." else home
