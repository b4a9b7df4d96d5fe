"""Stands between a client of the E2B wire and its server, and notes each request.

`python tests/helpers/e2b_recorder.py PYTHON` runs `e2b_scenario.py` with this interpreter, which
has the package `e2b`, against a cluster of its own, and writes `tests/data/e2b_requests.json`. The
requests are kept with placeholders for what differs from run to run, so that tests can send them
again without the package.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

REQUESTS = Path(__file__).parents[1] / "data" / "e2b_requests.json"
SCENARIO = Path(__file__).with_name("e2b_scenario.py")
_KEPT = ("content-type", "content-encoding", "connect-protocol-version", "connect-timeout-ms",
         "keepalive-ping-interval", "authorization", "e2b-sandbox-id", "e2b-sandbox-port",
         "x-access-token", "x-api-key", "idempotency-key")
# what differs from run to run: patterns, and the placeholder for each
_CHANGES = (
    (re.compile(r"i[0-9a-f]{20}"), "{ID}"),
    (re.compile(r'"pid": ?\d+'), '"pid":"{PID}"'),
    (re.compile(r'"watcherId": ?"[0-9a-f]+"'), '"watcherId":"{WATCHER}"'),
    (re.compile(r"signature=v1_[^&]+"), "signature={SIGNATURE}"))


class Recorder(ThreadingHTTPServer):
    """A server on a free port that passes requests on to `target` and notes them.

    Attributes:
        requests: the recorded requests, in the order of arrival.
        step: the name of the client's present step.
    """

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target)
        self.requests: list[dict[str, Any]] = []
        self.step = ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The URL at which clients reach it."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def note(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Notes a request, with placeholders."""
        kept = {name: _plain(headers[name]) for name in _KEPT if name in headers}
        for name, stands in (("x-api-key", "{KEY}"), ("x-access-token", "{TOKEN}"),
                             ("idempotency-key", "{UNIQUE}")):
            if name in kept:
                kept[name] = stands
        boundary = re.search("boundary=(.+)", kept.get("content-type", ""))
        if boundary:
            body = body.replace(boundary[1].encode(), b"BOUNDARY")
            kept["content-type"] = "multipart/form-data; boundary=BOUNDARY"
        self.requests.append({"step": self.step, "method": method, "path": _plain(path),
                              "headers": kept, **_body(kept.get("content-type", ""), body)})


def _plain(text: str) -> str:
    for pattern, stands in _CHANGES:
        text = pattern.sub(stands, text)
    return text


def _body(kind: str, body: bytes) -> dict[str, Any]:
    if kind == "application/connect+json":
        messages = []
        while body:
            size = struct.unpack_from(">xI", body)[0]
            messages.append(json.loads(_plain(body[5:5 + size].decode())))
            body = body[5 + size:]
        return {"envelopes": messages}
    if kind == "application/json" and body:
        return {"json": json.loads(_plain(body.decode()))}
    return {"base64": base64.b64encode(body).decode()} if body else {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def _pass_on(self) -> None:
        if self.path.startswith("/_step/"):
            self.server.step = self.path.rpartition("/")[2]
            return self._answer(204, {}, None)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read(headers)
        self.server.note(self.command, self.path, headers, body)
        target = self.server.target
        onward = http.client.HTTPConnection(target.hostname or "", target.port)
        headers = {name: value for name, value in headers.items()
                   if name not in ("host", "transfer-encoding", "content-length")}
        onward.request(self.command, self.path, body, headers)
        answer = onward.getresponse()
        self._answer(answer.status, dict(answer.getheaders()), answer)
        onward.close()

    def _read(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(headers.get("content-length", "0")))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict[str, str],
                answer: http.client.HTTPResponse | None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        if status == 204 or answer is None:
            self.end_headers()
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client has closed its stream
            while piece := answer.read1(65536):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_DELETE = do_PUT = _pass_on

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


def run_scenario(python: Path, url: str, key: str, recorder: Recorder | None = None
                 ) -> list[dict[str, Any]]:
    """Runs the scenario with an interpreter that has the SDK; returns its steps.

    Args:
        python: the interpreter.
        url, key: the server's, or those of a recorder before it.
        recorder: the recorder; None for none.
    """
    env = {"PATH": os.environ["PATH"], "E2B_API_URL": url, "E2B_SANDBOX_URL": url,
           "E2B_API_KEY": key}
    if recorder is not None:
        env["E2B_RECORDER"] = recorder.url
    told = subprocess.run([python, SCENARIO], env=env, capture_output=True, text=True, timeout=500,
                          check=False)
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    return [json.loads(line) for line in told.stdout.splitlines()]


def main() -> None:
    """Records the scenario."""
    from tangram_hpc import LocalCluster

    python = Path(sys.argv[1])
    version = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('e2b'))"],
        capture_output=True, text=True, check=True).stdout.strip()
    with LocalCluster(cpus=2, http=True) as cluster:
        assert cluster.http is not None
        recorder = Recorder(cluster.http.url)
        run_scenario(python, recorder.url, cluster.http.key, recorder)
    lines = ",\n".join(json.dumps(each) for each in recorder.requests)
    REQUESTS.write_text(f'{{"sdk": "e2b {version}", "requests": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
