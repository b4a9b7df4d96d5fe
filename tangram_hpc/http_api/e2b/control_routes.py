"""E2B's REST routes: making, finding, listing, connecting to, forking and ending sandboxes."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ..awaited import GivenUp, awaited, hung_up
from .control_wire import (
    ConnectSandbox,
    ErrorAnswer,
    ForkSandbox,
    IsoTime,
    NewSandbox,
    SandboxAnswer,
    SandboxInfo,
    SandboxTimeout,
    TemplateAnswer,
    TemplateBuild,
    check_given_once,
)
from .sandboxes import Sandbox, SandboxRegistry
from .wire_errors import ApiError, fault_of

ENVD_VERSION = "0.5.7"  # the version of E2B's envd whose requests this server understands
PAGE_MAX = 1000
_REFUSALS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer, "description": text}
                                              for status, text in (
    (400, "The request is wrong; the message names the field."), (401, "No known key was sent."),
    (404, "There is no such sandbox or template."),
    (501, "This server cannot do that."), (503, "There was no room, or no broker."))}
_STATES = "^(running|paused)(,(running|paused))*$"


class _ToldAsE2b(APIRoute):
    """A route that answers malformed requests with an error in E2B's form."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def told(request: Request) -> Response:
            check_given_once(request.query_params)
            try:
                answer: Response = await handle(request)
            except RequestValidationError as error:
                first = error.errors()[0]
                # in a body that is not JSON the place is the number of a character
                field = ".".join(each for each in first["loc"][1:] if isinstance(each, str))
                raise ApiError(400, f"{field or 'body'}: {fault_of(first)}") from None
            except HTTPException as error:  # JSON that is too deep, or has a number too long
                raise ApiError(error.status_code, f"body: {error.detail}") from None
            return answer

        return told


def control_routes(sandboxes: SandboxRegistry) -> APIRouter:
    """Returns the routes for these sandboxes."""
    router = APIRouter(route_class=_ToldAsE2b, tags=["E2B"], responses=_REFUSALS)
    for add in (_making, _looking, _keeping, _copying):
        add(router, sandboxes)
    return router


def _making(router: APIRouter, sandboxes: SandboxRegistry) -> None:
    @router.post("/sandboxes", status_code=201)
    @router.post("/v2/sandboxes", status_code=201)
    async def create(new: NewSandbox, http: Request) -> SandboxAnswer:
        """Makes a sandbox; answers when commands can run in it."""
        if unserved := new.unserved(sandboxes.options.network):
            raise ApiError(501, unserved)
        key = http.headers.get("idempotency-key", "")[:256]
        making = asyncio.ensure_future(sandboxes.create(
            _owner(http), new.templateID, new.timeout, metadata=new.metadata or {},
            env=new.envVars or {}, network=new.allow_internet_access is not False, key=key))
        try:
            return _answer(await awaited(making, lambda: hung_up(http)))
        except GivenUp:
            if not key:  # else the client may ask again
                _end_those_made(sandboxes, [making])
            raise _nobody_waits() from None

    @router.get("/templates/aliases/{alias:path}")
    async def template(alias: str, http: Request) -> TemplateAnswer:
        """Says whether there is a template of this name."""
        if sandboxes.options.image_of(alias) is None:
            raise ApiError(404, f"template {alias!r:.120} not found")
        return TemplateAnswer(templateID=alias)

    @router.post("/templates")
    @router.post("/v2/templates")
    @router.post("/v3/templates")
    async def build(asked: TemplateBuild) -> Response:
        """Refuses the request: images are given to the server when it is started."""
        raise ApiError(501, f"template {asked.name or asked.alias!r:.120}: this server builds no "
                            "templates; start it with --e2b-template NAME=IMAGE, and let the "
                            "client use that name")


def _looking(router: APIRouter, sandboxes: SandboxRegistry) -> None:
    @router.get("/sandboxes")
    @router.get("/v2/sandboxes")
    async def listing(
            http: Request, response: Response,
            limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
            nextToken: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
            order: Literal["asc", "desc"] = "desc",
            state: Annotated[str, Query(pattern=_STATES)] = "running",
            startedAfter: IsoTime | None = None, template: str | None = None,
            metadata: str = "") -> list[SandboxInfo]:
        """Lists the client's sandboxes, the latest first."""
        since, noted = _timestamp(startedAfter), _pairs(metadata)
        found = [each for each in sandboxes.of(_owner(http)) if "running" in state.split(",")
                 and template in (None, each.record.template) and each.record.started >= since
                 and noted.items() <= each.record.metadata.items()]
        found.sort(key=lambda each: (each.record.started, each.id), reverse=order == "desc")
        if nextToken + limit < len(found):
            response.headers["X-Next-Token"] = str(nextToken + limit)
        return [_info(each) for each in found[nextToken:nextToken + limit]]

    @router.get("/sandboxes/{number}")
    async def info(number: str, http: Request) -> SandboxInfo:
        """Describes a sandbox."""
        return _info(await sandboxes.find(number, _owner(http)))


def _keeping(router: APIRouter, sandboxes: SandboxRegistry) -> None:
    @router.delete("/sandboxes/{number}", status_code=204)
    async def kill(number: str, http: Request) -> Response:
        """Ends a sandbox with everything in it."""
        sandboxes.end(await sandboxes.find(number, _owner(http)))
        return Response(status_code=204)

    @router.post("/sandboxes/{number}/timeout", status_code=204)
    async def timeout(number: str, new: SandboxTimeout, http: Request) -> Response:
        """Moves a sandbox's end."""
        sandbox = await sandboxes.find(number, _owner(http))
        if new.timeout:
            await sandboxes.set_end(sandbox, new.timeout)
        else:
            sandboxes.end(sandbox)
        return Response(status_code=204)

    @router.post("/sandboxes/{number}/connect")
    @router.post("/v2/sandboxes/{number}/connect")
    async def connect(number: str, new: ConnectSandbox, http: Request) -> SandboxAnswer:
        """Tells how to reach a sandbox, even if an earlier server has made it."""
        sandbox = await sandboxes.find(number, _owner(http))
        if new.timeout:
            await sandboxes.set_end(sandbox, new.timeout, only_later=True)
        return _answer(sandbox)


def _copying(router: APIRouter, sandboxes: SandboxRegistry) -> None:
    @router.post("/sandboxes/{number}/fork", status_code=201)
    async def fork(number: str, new: ForkSandbox, http: Request) -> list[dict[str, Any]]:
        """Makes sandboxes with a copy of this one's files."""
        sandbox = await sandboxes.find(number, _owner(http))
        forks = [asyncio.ensure_future(sandboxes.fork(sandbox, new.timeout))
                 for _ in range(new.count)]
        try:
            made = await awaited(asyncio.gather(*forks, return_exceptions=True),
                                 lambda: hung_up(http))
        except GivenUp:
            _end_those_made(sandboxes, forks)
            raise _nobody_waits() from None
        return [_forked(each) for each in made]

    @router.post("/sandboxes/{number}/pause")
    async def pause(number: str, http: Request) -> Response:
        """Refuses the request, because a session cannot be paused."""
        await sandboxes.find(number, _owner(http))
        raise ApiError(501, "pause: sandboxes of this server cannot be paused; a sandbox in which "
                            "nothing runs holds its memory and no CPU")

    @router.get("/sandboxes/{number}/metrics")
    @router.put("/sandboxes/{number}/network")
    @router.post("/sandboxes/{number}/snapshots")
    async def not_served(number: str, http: Request) -> Response:
        """Refuses the request. With 404 the SDK would say that the sandbox is gone."""
        await sandboxes.find(number, _owner(http))
        raise ApiError(501, f"{http.url.path.rpartition('/')[2]}: this server does not serve this; "
                            "docs/HTTP.md says what it serves")


def _end_those_made(sandboxes: SandboxRegistry, makings: list[asyncio.Task[Sandbox]]) -> None:
    """Ends the sandboxes that were ready at the moment when their client hung up."""
    for making in makings:
        if not making.cancelled() and making.exception() is None:
            sandboxes.end(making.result())


def _nobody_waits() -> ApiError:
    return ApiError(503, "the client has hung up")


def _owner(http: Request) -> str:
    owner = http.scope["state"]["client"]
    assert isinstance(owner, str)
    return owner


def _timestamp(when: datetime | None) -> float:
    """A time that a client names, in seconds since the epoch; one without a zone is UTC."""
    if when is None:
        return 0.0
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def _pairs(text: str) -> dict[str, str]:
    """Returns the metadata that a sandbox must have, from `KEY=VALUE&...`, where both are quoted
    once more."""
    try:
        found = parse_qsl(text, keep_blank_values=True, strict_parsing=True) if text else []
    except ValueError:
        raise ApiError(400, "metadata: it is not KEY=VALUE&KEY=VALUE, quoted for a URL") from None
    return {unquote(key): unquote(value) for key, value in found}


def _answer(sandbox: Sandbox) -> SandboxAnswer:
    record = sandbox.record
    return SandboxAnswer(templateID=record.template, sandboxID=record.id,
                         envdVersion=ENVD_VERSION, envdAccessToken=record.access_token,
                         trafficAccessToken=sandbox.traffic_token)


def _info(sandbox: Sandbox) -> SandboxInfo:
    record = sandbox.record
    return SandboxInfo(
        templateID=record.template, sandboxID=record.id, envdVersion=ENVD_VERSION,
        startedAt=_time(record.started), endAt=_time(record.ends), cpuCount=record.cpus[1],
        memoryMB=record.memory_mib, metadata=record.metadata,
        allowInternetAccess=record.network)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _forked(made: Sandbox | BaseException) -> dict[str, Any]:
    if isinstance(made, Sandbox):
        return {"sandbox": _answer(made).model_dump()}
    if isinstance(made, ApiError):
        return {"error": {"code": made.status, "message": made.message}}
    raise made

