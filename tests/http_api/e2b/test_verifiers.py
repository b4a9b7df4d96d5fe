"""An evaluation with verifiers' e2b runtime, unmodified, in a virtual environment of its own.

The policy is a server of the test that always answers with one shell command. All else is real:
`vf-eval` makes a sandbox for each task, the harness runs in it and reaches the policy through the
server of verifiers on this machine, and rewards read the sandbox's files.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc import LocalCluster
from tests.helpers.e2b_player import Player
from tests.helpers.http_serving import Serving
from tests.helpers.other_python import CHECKOUT, find_python, make_venv

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # installs packages
VERSION = "0.4.0"
NAME = ("from verifiers.v1.runtimes.e2b import E2BConfig, E2BRuntime\n"
        "print(E2BRuntime(E2BConfig())._template_name())")


class Policy(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible model that gives the same answer to everything."""

    def do_POST(self) -> None:
        """Answers one request."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({
            "id": "1", "object": "chat.completion", "created": 1, "model": asked["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": {
                "role": "assistant", "content": "cat given given >made"}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing."""


@pytest.fixture
def policy() -> Iterator[str]:
    """The base URL of the policy."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Policy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def evaluate(bin_folder: Path, folder: Path, server: Serving, policy: str) -> list[dict[str, Any]]:
    """Runs `vf-eval` on the environment of `verifiers_words`; returns its episodes."""
    port = free_port()
    options = {
        "--env.agent.runtime.type": "e2b", "--env.agent.runtime.workdir": "/tmp/app",
        "--env.agent.runtime.creates-per-sec": "None", "--env.interception.type": "server",
        "--env.interception.tunnel.type": "custom",
        "--env.interception.tunnel.url": f"http://127.0.0.1:{port}",
        "--env.interception.tunnel.port": str(port), "--client.base-url": policy,
        "--model": "policy", "--output-dir": str(folder), "--run.dir": "run"}
    told = subprocess.run(
        [bin_folder / "vf-eval", "verifiers_words", "--no-push",
         *(word for pair in options.items() for word in pair)],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(folder),
             "PYTHONPATH": str(folder), "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url,
             "E2B_API_KEY": server.key})
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    lines = (folder / "run/traces.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_environment_runs_in_sandboxes_and_gets_its_rewards(tmp_path: Path, policy: str) -> None:
    bin_folder = make_venv(tmp_path / "venv", find_python((3, 11)), [f"verifiers[e2b]=={VERSION}"])
    shutil.copy(CHECKOUT / "tests/helpers/verifiers_words.py", tmp_path)
    template = subprocess.run([bin_folder / "python", "-c", NAME], capture_output=True, text=True,
                              check=True).stdout.strip()
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster, Serving(
            cluster, "--e2b-template", f"{template}=", "--e2b-network") as server:
        episodes = evaluate(bin_folder, tmp_path, server, policy)
        left = Player(server.url, server.key).control("GET", "/v2/sandboxes").json
    assert [each["errors"] for each in episodes] == [[], [], []]
    for episode in episodes:
        (trace,) = episode["traces"]
        assert trace["agent"]["runtime"]["template"] == template
        assert trace["rewards"]["reward"]["score"] == 1.0, trace
    assert left == []
