"""Sends requests of the E2B wire without its SDK: requests that `e2b_recorder` recorded, and
others."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tangram_hpc import LocalCluster
from tests.helpers.e2b_recorder import REQUESTS


def framed(message: Any, flags: int = 0) -> bytes:
    """Returns the envelope of one message of a Connect stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def noted() -> list[dict[str, Any]]:
    """Returns the requests that the SDK sent."""
    requests: list[dict[str, Any]] = json.loads(REQUESTS.read_text())["requests"]
    return requests


@dataclass
class Answer:
    """An answer of the server.

    Attributes:
        status: the HTTP status.
        body: the body.
        headers: the headers, with lower-case names.
    """

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def messages(self) -> list[Any]:
        """The messages of a stream; the last one is its end."""
        return list(messages(self.body))

    @property
    def error(self) -> Any:
        """Why the call has failed: the error in the end of a stream, or the body of another
        answer, whose status is not 200 then."""
        if self.headers["content-type"] == "application/connect+json":
            assert self.status == 200, "a stream tells its error itself"
            return self.messages[-1]["error"]
        assert self.status != 200
        return self.json

    @property
    def events(self) -> list[Any]:
        """The events of a process, without keepalives."""
        return [each["event"] for each in self.messages
                if "event" in each and "keepalive" not in each["event"]]

    def output(self, name: str = "stdout") -> bytes:
        """Returns what a process has written to one stream."""
        return b"".join(base64.b64decode(each["data"].get(name, "")) for each in self.events
                        if "data" in each)

    @property
    def exit_code(self) -> int | None:
        """The exit code of a process; None if the stream has no event of its end."""
        ends = [each["end"] for each in self.events if "end" in each]
        return ends[0].get("exitCode", 0) if ends else None


def messages(body: bytes) -> Iterator[Any]:
    """The messages of a whole Connect stream."""
    while body:
        flags, size = struct.unpack_from(">BI", body)
        message, body = json.loads(body[5:5 + size]), body[5 + size:]
        assert len(message) >= 0 and (flags == 2) == (not body), "only the last one is an end"
        yield message


@dataclass
class Player:
    """A client of one server.

    Attributes:
        url, key: the URL of the server, and the client's key for it.
        known: the values of the placeholders in recorded requests.
    """

    url: str
    key: str
    known: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: LocalCluster) -> Player:
        """Returns a client of a cluster's HTTP server."""
        assert cluster.http is not None
        return cls(cluster.http.url, cluster.http.key)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Sends one request; `_` in a header's name stands for a hyphen."""
        connection = self.open(method, path, body, **headers)
        answer = connection.getresponse()
        told = Answer(answer.status, answer.read(), {
            name.lower(): value for name, value in answer.getheaders()})
        connection.close()
        return told

    def open(self, method: str, path: str, body: bytes | None = None, **headers: str
             ) -> http.client.HTTPConnection:
        """Sends one request, and returns the connection on which its answer comes."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=100)
        connection.request(method, path, body,
                           {name.replace("_", "-"): value for name, value in headers.items()})
        return connection

    def control(self, method: str, path: str, message: Any = None, **headers: str) -> Answer:
        """Sends one request with the client's key."""
        body = None if message is None else json.dumps(message).encode()
        return self.send(method, path, body, **{
            "X_API_KEY": self.key, "Content_Type": "application/json", **headers})

    def create(self, **fields: Any) -> str:
        """Makes the sandbox to which the following requests are sent; returns its id."""
        told = self.control("POST", "/v2/sandboxes", {"timeout": 300, **fields})
        assert told.status == 201, told.body
        self.known = {"ID": told.json["sandboxID"], "TOKEN": told.json["envdAccessToken"]}
        return self.known["ID"]

    def _own(self) -> dict[str, str]:
        return {"E2b_Sandbox_Id": self.known["ID"], "X_Access_Token": self.known["TOKEN"]}

    def data(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Sends one request to the sandbox."""
        return self.send(method, path, body, **{**self._own(), **headers})

    def call(self, name: str, message: Any, **headers: str) -> Answer:
        """Calls `SERVICE/METHOD` of the sandbox."""
        return self.data("POST", f"/{name}", json.dumps(message).encode(),
                         Content_Type="application/json", **headers)

    def stream(self, name: str, message: Any, **headers: str) -> Answer:
        """Calls `SERVICE/METHOD` of the sandbox, whose answer is a stream, and reads all of it."""
        return self.data("POST", f"/{name}", framed(message),
                         Content_Type="application/connect+json", **headers)

    def begin(self, line: str, stdin: bool = False, **headers: str) -> Process:
        """Starts a shell line, and returns when it has started."""
        return Process(self.open(
            "POST", "/process.Process/Start", framed(shell(line, stdin)),
            **{**self._own(), "Content_Type": "application/connect+json", **headers}))

    def begin_download(self, path: str) -> http.client.HTTPResponse:
        """Asks for a file; returns the answer when it has begun."""
        answer = self.open("GET", f"/files?path={path}", **self._own()).getresponse()
        assert answer.status == 200, answer.read()
        return answer

    def run(self, line: str, **headers: str) -> Answer:
        """Runs a shell line to its end."""
        return self.stream("process.Process/Start", shell(line), **headers)

    def play(self, request: dict[str, Any]) -> Answer:
        """Sends a noted request again."""
        return self.send(request["method"], self._filled(request["path"]), self._body(request), **{
            name: self._filled(value) for name, value in request["headers"].items()})

    def _filled(self, text: str) -> str:
        for name, value in {"KEY": self.key, **self.known}.items():
            text = text.replace(f'"{{{name}}}"', value) if name == "PID" else text.replace(
                f"{{{name}}}", value)
        return text

    def _body(self, request: dict[str, Any]) -> bytes | None:
        if "envelopes" in request:
            return b"".join(framed(json.loads(self._filled(json.dumps(each))))
                            for each in request["envelopes"])
        if "json" in request:
            return self._filled(json.dumps(request["json"])).encode()
        return base64.b64decode(request["base64"]) if "base64" in request else None


def shell(line: str, stdin: bool = False) -> dict[str, Any]:
    """Returns the message that starts a shell line, as the SDK sends it."""
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", line]}, "stdin": stdin}


class Process:
    """A command that was started and whose stream of events is open."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._answer = connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.first = self._answer.read1(65536)
        (size,) = struct.unpack_from(">xI", self.first)
        self.pid: int = json.loads(self.first[5:5 + size])["event"]["start"]["pid"]

    def end(self) -> Answer:
        """Reads the stream to its end."""
        return Answer(200, self.first + self._answer.read(), {})

    def leave(self) -> None:
        """Cuts the stream."""
        self._answer.close()
        self._connection.close()
