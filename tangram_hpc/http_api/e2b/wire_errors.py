"""Errors of the E2B wire in their two forms: that of its REST routes, and that of Connect.

A client maps an error to an exception class by its status (REST) or its code (Connect). So both are
chosen by what the client should do, and not by what happened inside.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ... import (
    ActionFailed,
    BrokerUnreachable,
    ClientClosed,
    FileDenied,
    FileFailed,
    FileInTheWay,
    FileIsFolder,
    FileIsNoFolder,
    FileMissing,
    InfeasibleRequest,
    InvalidInput,
    SessionLost,
    TangramError,
)

# Connect's words for errors -> the HTTP status of an answer to a single request
STATUS = {"canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504,
          "not_found": 404, "already_exists": 409, "permission_denied": 403,
          "resource_exhausted": 429, "failed_precondition": 400, "unimplemented": 501,
          "internal": 500, "unavailable": 503, "unauthenticated": 401}


class ApiError(Exception):
    """A request to a REST route is refused.

    Args:
        status: the HTTP status, which is also the `code` in the body.
        message: one line for the user.
        retry_after_s: when the client may try again, in seconds; 0 for not at all.
    """

    def __init__(self, status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after_s = status, message, retry_after_s

    def response(self) -> JSONResponse:
        """Returns the HTTP answer that carries this error."""
        retry = {"Should-Retry": "true", "Retry-After": str(self.retry_after_s)}
        return JSONResponse({"code": self.status, "message": self.message}, self.status,
                            retry if self.retry_after_s else {"Should-Retry": "false"})


class RpcError(Exception):
    """A call of the Connect protocol is refused or has failed.

    Args:
        code: one of `STATUS`.
        message: one line for the user.
    """

    def __init__(self, code: str, message: str) -> None:
        assert code in STATUS, code
        super().__init__(message)
        self.code, self.message = code, message

    def told(self) -> dict[str, str]:
        """Returns the error as the protocol writes it."""
        return {"code": self.code, "message": self.message}

    def response(self) -> JSONResponse:
        """Returns the HTTP answer to a single call that carries this error."""
        return JSONResponse(self.told(), STATUS[self.code])


def fault_of(error: dict[str, Any]) -> str:
    """Returns what is wrong with a field, or with the body as a whole.

    Args:
        error: one of the errors of a RequestValidationError. A body that came without the content
            type of JSON is told as one that is no object.
    """
    if error["type"] == "model_attributes_type" and len(error["loc"]) == 1:
        return "it is no JSON object that came with Content-Type: application/json"
    return str(error["msg"])


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    """Answers a request whose route has raised an ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_no_route(request: Request, error: Exception) -> Response:
    """Answers a request whose address leads to no route, or to none for its method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and "endpoint" in request.scope:
        return await http_exception_handler(request, error)  # a route's own 404
    answer = ApiError(error.status_code, f"{request.method} {request.url.path:.200}: this server "
                                         "does not serve this; docs/HTTP.md says what it serves"
                      ).response()
    answer.headers.update(error.headers or {})
    return answer


# errors of files that are due to the path: a device, a circle of links, a name
_OF_PATHS = {"EINVAL", "ELOOP", "ENAMETOOLONG", "EILSEQ"}
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (FileMissing, "not_found"), (FileInTheWay, "already_exists"),
    (FileDenied, "permission_denied"), (FileIsFolder, "invalid_argument"),
    (FileIsNoFolder, "invalid_argument"), (InfeasibleRequest, "resource_exhausted"),
    (InvalidInput, "invalid_argument"), (SessionLost, "unavailable"),
    (BrokerUnreachable, "unavailable"), (ClientClosed, "unavailable"),
    (ActionFailed, "internal"), (TangramError, "internal"))


def as_rpc_error(error: TangramError, sandbox: str) -> RpcError:
    """Returns the error of this wire for an error of the job.

    Args:
        error: what the client of the job has raised.
        sandbox: the id of the sandbox in which the error happened.
    """
    if isinstance(error, SessionLost):
        return gone(sandbox)
    if isinstance(error, FileFailed) and error.code in _OF_PATHS:
        return RpcError("invalid_argument", str(error))
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    return RpcError(code, str(error) or type(error).__name__)


def gone(sandbox: str) -> RpcError:
    """Returns the error for a sandbox that has ended, with E2B's own text."""
    return RpcError("unavailable", f"The sandbox was not found: {sandbox}")


def gone_response(sandbox: str) -> JSONResponse:
    """Returns the HTTP answer for a sandbox that has ended. It equals the answer of E2B's proxy,
    which clients recognize."""
    body: dict[str, Any] = {"sandboxId": sandbox, "message": "The sandbox was not found",
                            "code": 502}
    return JSONResponse(body, 502)
