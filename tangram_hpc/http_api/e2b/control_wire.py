"""The requests of E2B's REST routes, field by field. Fields and query parameters that nothing
here reads are ignored, but no query parameter may be given twice."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, StrictBool
from starlette.datastructures import QueryParams

from .images import BASE
from .sandboxes import FORKS_MAX
from .wire_errors import ApiError


def _number(value: Any) -> Any:
    """Refuses texts and truth values, which pydantic would take for numbers."""
    if isinstance(value, bool | str):
        raise ValueError("it is not a number")
    return value


def _iso_time(value: Any) -> Any:
    """Refuses numbers, which pydantic would take for seconds since the epoch."""
    if not isinstance(value, str) or value[4:5] != "-":
        raise ValueError("it is not a time of ISO 8601")
    return value


IsoTime = Annotated[datetime, BeforeValidator(_iso_time)]
_Whole = Annotated[int, BeforeValidator(_number)]
_Seconds = Annotated[_Whole, Field(ge=0, le=1 << 31)]
_Text = Annotated[str, Field(max_length=1 << 17, pattern=r"^[^\x00]*$")]
_Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00=]*$")]
_Variables = Annotated[dict[_Name, _Text], Field(max_length=256)]
_Notes = Annotated[dict[_Text, _Text], Field(max_length=256)]
_FILTERS = ("denyOut", "rules", "egressProxy")  # of `network`: what bounds or changes its use


class NewSandbox(BaseModel):
    """A sandbox that a client wants.

    Attributes:
        templateID: the template, which names its image.
        timeout: seconds after which the sandbox is closed.
        metadata: notes of the client about the sandbox; `images.wanted` reads some of them.
        envVars: environment variables of all its commands.
        allow_internet_access: False if the sandbox shall have no network; otherwise it has the
            network if the server allows it.
        network: E2B's filters of the network.
        volumeMounts: volumes for the sandbox.
        autoPause: whether the sandbox shall be paused, and not closed, when its time is over.
    """

    templateID: Annotated[str, Field(max_length=512)] = BASE
    timeout: _Seconds = 300
    metadata: _Notes | None = None
    envVars: _Variables | None = None
    allow_internet_access: StrictBool | None = None
    network: dict[str, Any] | None = None
    volumeMounts: list[Any] | None = None
    autoPause: StrictBool | None = None

    def unserved(self, network: bool) -> str:
        """Returns one line about what the client wants and this server cannot do; empty if there is
        nothing.

        Args:
            network: whether the server lets sandboxes have the network.
        """
        if self.volumeMounts:
            return "volumeMounts: this server has no volumes; write the files into the sandbox"
        if self.autoPause:
            return ("autoPause: sandboxes of this server are closed when their timeout is over, "
                    "and cannot be paused; create them with on_timeout 'kill' (the SDK's "
                    "`lifecycle`), and with a timeout that is long enough")
        filters = [each for each in _FILTERS if (self.network or {}).get(each)]
        if filters and network and self.allow_internet_access is not False:
            return (f"network: {filters[0]}: this server does not filter a sandbox's network; "
                    "allow_internet_access=False gives it none")
        return ""


class SandboxTimeout(BaseModel):
    """A sandbox's new end.

    Attributes:
        timeout: seconds from now.
    """

    timeout: _Seconds


class ConnectSandbox(BaseModel):
    """A client wants to use a sandbox that is open.

    Attributes:
        timeout: the sandbox lives for at least this many seconds from now; None to leave its end as
            it is.
    """

    timeout: _Seconds | None = None


class ForkSandbox(BaseModel):
    """A client wants copies of a sandbox.

    Attributes:
        timeout: seconds after which the copies are closed.
        count: the number of copies.
    """

    timeout: _Seconds = 300
    count: Annotated[_Whole, Field(ge=1, le=FORKS_MAX)] = 1


class ErrorAnswer(BaseModel):
    """Why a request was refused.

    Attributes:
        code: the HTTP status.
        message: one line for the user.
    """

    code: int
    message: str


class SandboxAnswer(BaseModel):
    """How a client reaches a sandbox.

    Attributes:
        templateID: the template that it was made from.
        sandboxID: its id.
        clientID: a part of the id in old versions of the wire; always `tangram`.
        envdVersion: the version by which the client chooses the form of some requests.
        envdAccessToken: the value that each request to the sandbox must send as X-Access-Token.
        trafficAccessToken: the value that requests to a port of the sandbox send as
            E2B-Traffic-Access-Token. It opens `run_code` alone, whose code can do in the sandbox
            what commands can.
    """

    templateID: str
    sandboxID: str
    clientID: str = "tangram"
    envdVersion: str
    envdAccessToken: str
    trafficAccessToken: str


class SandboxInfo(BaseModel):
    """What is known of a sandbox.

    Attributes:
        templateID, sandboxID, clientID, envdVersion: as in `SandboxAnswer`.
        startedAt, endAt: when it was made, and when it is closed.
        cpuCount: the most CPUs of each of its commands.
        memoryMB: the memory that it holds, in MiB; 0 for no bound of its own.
        diskSizeMB: always 0; the site's `disk_mib` bounds it.
        state: always `running`.
        metadata: what its client has noted.
        allowInternetAccess: whether it has the node's network.
    """

    templateID: str
    sandboxID: str
    clientID: str = "tangram"
    envdVersion: str
    startedAt: str
    endAt: str
    cpuCount: int
    memoryMB: int
    diskSizeMB: int = 0
    state: str = "running"
    metadata: dict[str, str]
    allowInternetAccess: bool


class TemplateBuild(BaseModel):
    """A template that a client wants built.

    Attributes:
        name: its name.
        alias: its name in requests of older clients.
    """

    name: Annotated[str, Field(max_length=512)] = ""
    alias: Annotated[str, Field(max_length=512)] = ""


class TemplateAnswer(BaseModel):
    """A template that this server offers.

    Attributes:
        templateID: its name.
        public: whether all clients may use it.
    """

    templateID: str
    public: bool = True


def check_given_once(query: QueryParams) -> None:
    """Refuses a query that gives a parameter twice: its client and this server could read different
    ones.

    Raises:
        ApiError: 400; the message names the parameter.
    """
    for name, count in Counter(name for name, _ in query.multi_items()).items():
        if count > 1:
            raise ApiError(400, f"{name:.60}: it is given {count} times; give it once")
