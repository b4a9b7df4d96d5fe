"""The HTTP application: its routes, and how wrong requests are answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from .. import Client, __version__
from .awaited import hung_up
from .code_wire import RunCodeRequest, RunCodeResponse
from .e2b import file_routes, filesystem_routes, process_routes
from .e2b.connect_protocol import on_rpc_error
from .e2b.control_routes import control_routes
from .e2b.sandbox_access import SandboxAccess
from .e2b.sandboxes import SandboxRegistry
from .e2b.wire_errors import (
    ApiError,
    RpcError,
    fault_of,
    on_api_error,
    on_no_route,
)
from .guard import Guard
from .interpreter import code_routes
from .keys import ClientKeys
from .rewards import RewardFunction, RewardRequest, Rewards
from .run_code import CodeRunner

_UNREADABLE: dict[int | str, dict[str, Any]] = {400: {"description": "The body cannot be read."}}


def make_app(client: Client, keys: ClientKeys, *, image: str = "",
             rewards: Mapping[str, RewardFunction] | None = None,
             sandboxes: SandboxRegistry | None = None) -> ASGIApp:
    """Returns the application.

    Args:
        client: submits what the requests ask for.
        keys: the keys of those who may send requests.
        image: the image in which programs run; empty for the node's own programs.
        rewards: the reward functions by their names in the URL.
        sandboxes: the sandboxes of the E2B wire; None to serve none.
    """
    app = FastAPI(title="tangram", version=__version__,
                  description="Programs and rewards, run as actions of a tangram_hpc job.",
                  redirect_slashes=False)  # a redirection would leave out a key in the path
    app.add_exception_handler(RequestValidationError, _wrong)
    code, scores = CodeRunner(client, image), Rewards(client, rewards or {})

    @app.get("/v1/ping")
    async def ping() -> str:
        """Answers `pong`."""
        return "pong"

    @app.post("/run_code", responses={**_UNREADABLE,
                                      504: {"description": "No cores were free in time."}})
    async def run_code(request: RunCodeRequest, http: Request) -> RunCodeResponse:
        """Runs one program in a fresh sandbox (SandboxFusion's wire)."""
        return await code.run(request, lambda: hung_up(http))

    @app.post("/reward/{name}", response_model=None, responses={
        **_UNREADABLE, 404: {"description": "There is no such reward function."},
        500: {"description": "The function raised, or returned no finite number."},
        503: {"description": "The function could not be run now."}})
    async def reward(name: str, request: RewardRequest, http: Request) -> Any:
        """Scores answers with the reward function NAME (OpenRLHF's and slime's wires)."""
        return await scores.score(name, request, lambda: hung_up(http))

    if sandboxes is None:
        return Guard(app, keys)
    _add_e2b(app, sandboxes)
    return Guard(process_routes.direct(app), keys, access=SandboxAccess(sandboxes))


def _add_e2b(app: FastAPI, sandboxes: SandboxRegistry) -> None:
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RpcError, on_rpc_error)
    app.add_exception_handler(404, on_no_route)
    app.add_exception_handler(405, on_no_route)
    for router in (control_routes(sandboxes), process_routes.router, filesystem_routes.router,
                   file_routes.router, code_routes.router):
        app.include_router(router)


async def _wrong(request: Request, error: Exception) -> JSONResponse:
    """Answers a request whose fields are wrong. The answer does not repeat what was sent, which may
    be large or secret."""
    assert isinstance(error, RequestValidationError)
    detail = [{"loc": list(each["loc"]), "msg": fault_of(each), "type": each["type"]}
              for each in error.errors()]
    return JSONResponse({"detail": detail}, 422)
