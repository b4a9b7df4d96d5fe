"""Downloads and uploads of a sandbox's files (`/files`), and the check that it is open (`/health`).
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ... import FileFailed, TangramError
from ..cut_off import CutOff
from .control_wire import check_given_once
from .filesystem_routes import absolute
from .multipart import read_files
from .sandboxes import Sandbox
from .unpacking import UPLOADS, unpacked, unpacked_size
from .wire_errors import STATUS, ApiError, RpcError

PIECE = 8 << 20  # bytes of one read of a file, which the broker carries as one message
router = APIRouter(include_in_schema=False)


@router.get("/health")
async def health(request: Request) -> Response:
    """Answers that the sandbox is open; the guard has refused the request if it is not."""
    return Response(status_code=204)


@router.get("/files")
async def download(request: Request) -> Response:
    """Answers with a file's content."""
    sandbox: Sandbox = request.scope["state"]["sandbox"]
    check_given_once(request.query_params)
    try:
        path = await absolute(sandbox, request.query_params.get("path"))
        async with sandbox.processes.quiet() as session:
            first = await session.read(path, 0, PIECE)
    except RpcError as error:
        raise ApiError(STATUS[error.code], error.message) from None
    if len(first) < PIECE:
        return Response(first, media_type="application/octet-stream")
    return StreamingResponse(_pieces(sandbox, path, first), media_type="application/octet-stream")


async def _pieces(sandbox: Sandbox, path: str, piece: bytes) -> AsyncIterator[bytes]:
    offset = 0
    while piece:
        yield piece
        offset += len(piece)
        try:
            piece = b"" if len(piece) < PIECE else await sandbox.session.read(path, offset, PIECE)
        except TangramError as error:
            raise CutOff(f"GET /files: {path!r:.200} of sandbox {sandbox.id} after {offset} bytes: "
                         f"{error}") from None


@router.post("/files")
async def upload(request: Request) -> JSONResponse:
    """Writes one file or several."""
    sandbox: Sandbox = request.scope["state"]["sandbox"]
    check_given_once(request.query_params)
    # the guard hands the body on in one piece; `body()` would copy it
    body, *_ = [piece async for piece in request.stream()]
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return await _write(sandbox, request, body)
    await sandbox.processes.make_room()  # nobody shall hold bytes until the end of a terminal
    async with UPLOADS.held(unpacked_size(body)):
        return await _write(sandbox, request, await asyncio.to_thread(unpacked, body, encoding))


async def _write(sandbox: Sandbox, request: Request, body: bytes | bytearray
                 ) -> JSONResponse:
    """Writes the files of an upload whose content is `body`."""
    target, kind = request.query_params.get("path"), request.headers.get("content-type", "")
    if kind.startswith("multipart/form-data"):
        files = await asyncio.to_thread(read_files, kind, body)
        if target is not None and len(files) > 1:
            raise ApiError(400, "path: it names one file, and several were sent")
    else:
        files = [("", memoryview(body))]
    if not files:
        raise ApiError(400, "the body has no part with the name `file`")
    try:
        paths = [await absolute(sandbox, target or name) for name, _ in files]
        async with sandbox.processes.quiet() as session:
            for path, (_, data) in zip(paths, files, strict=True):
                await session.write(path, data)
    except RpcError as error:
        no_space = isinstance(error.__cause__, FileFailed) and error.__cause__.code == "ENOSPC"
        raise ApiError(507 if no_space else STATUS[error.code], error.message) from None
    return JSONResponse([{"name": posixpath.basename(path), "type": "file", "path": path}
                         for path in paths])
