"""The unmodified SDK, in a virtual environment of its own, against a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc import LocalCluster
from tests.helpers.e2b_player import noted
from tests.helpers.e2b_recorder import REQUESTS, Recorder, run_scenario

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # a fixture installs packages
ATTACH = """
import sys
from e2b import Sandbox
box = Sandbox.connect(sys.argv[1])
print(box.commands.run("cat /tmp/kept").stdout, box.kill())
"""
MAKE = """
import asyncio
from e2b import AsyncSandbox

async def main():
    box = await AsyncSandbox.create(timeout=100)
    await box.files.write("/tmp/kept", "kept")
    runs = await asyncio.gather(*[box.commands.run(f"sleep 0.2; echo {n}") for n in range(5)])
    assert [run.stdout for run in runs] == [f"{n}\\n" for n in range(5)]
    print(box.sandbox_id)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the newest SDK that is offered to users."""
    if sys.version_info < (3, 11):
        pytest.skip("e2b 2.63 needs Python 3.11")
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    told = subprocess.run([folder / "bin" / "pip", "install", "-q", "e2b<3"], capture_output=True,
                          text=True, check=False)
    if told.returncode:
        pytest.skip(f"e2b cannot be installed: {told.stderr.strip()[-200:]}")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), http=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def played(python: Path, cluster: LocalCluster) -> tuple[dict[str, Any], Recorder]:
    """Runs the scenario; returns the SDK's result of each step, and the recorder in between."""
    assert cluster.http is not None
    recorder = Recorder(cluster.http.url)
    steps = run_scenario(python, recorder.url, cluster.http.key, recorder)
    return {each["step"]: each for each in steps}, recorder


@pytest.mark.parametrize(("step", "gave"), [
    ("run", {"stdout": "hi 1 2\n/session\n", "stderr": "err\n", "exit_code": 0, "error": None}),
    ("run-cwd", {"stdout": "/tmp\n", "stderr": "", "exit_code": 0, "error": None}),
    ("run-streams", 2), ("beside", {"stdout": "beside\n", "stderr": "", "exit_code": 0,
                                    "error": None}),
    ("server-connect", True), ("server-kill", True), ("server-kill-again", False),
    ("cat-wait", {"stdout": "hello\ndone\n", "stderr": "", "exit_code": 0, "error": None}),
    ("read", "text"), ("read-relative", "\x00\xff\r\n--"), ("read-two", "2"),
    ("read-gzip", "z" * 1000), ("ls", [["b.txt", "file", 4]]), ("info", "-rw-r--r--"),
    ("exists", [True, False]), ("mkdir", [True, False]), ("rename", "/tmp/m/x9"),
    ("events", [["new", "create"], ["new", "write"]]), ("signed", "1"), ("pty-heard", True),
    ("is-running", True),
    ("listing", [True]), ("listing-others", []), ("connect", "1"), ("fork-read", "zzz"),
    ("fork-kill", True), ("kill", True), ("kill-again", False), ("is-running-after", False)])
def test_the_sdk_gives_what_its_user_expects(played: tuple[dict[str, Any], Recorder], step: str,
                                             gave: Any) -> None:
    assert played[0][step].get("gave") == gave, played[0][step]


@pytest.mark.parametrize(("step", "error", "exit_code"), [
    ("run-fails", "CommandExitException", 3), ("run-no-cwd", "InvalidArgumentException", None),
    ("run-timeout", "TimeoutException", None), ("wait", "CommandExitException", 4),
    ("server-wait", "CommandExitException", 137), ("server-gone", "CommandExitException", 1),
    ("read-missing", "FileNotFoundException", None), ("pty-wait", "CommandExitException", 5),
    ("pause", "SandboxException", None), ("no-template", "SandboxException", None),
    ("run-after", "SandboxNotRunningException", None)])
def test_the_sdk_raises_what_its_user_expects(played: tuple[dict[str, Any], Recorder], step: str,
                                              error: str, exit_code: int | None) -> None:
    told = played[0][step]
    assert told.get("raised") == error, told
    assert exit_code is None or told["gave"]["exit_code"] == exit_code


def test_the_noted_requests_are_still_what_the_sdk_sends(
        played: tuple[dict[str, Any], Recorder], python: Path) -> None:
    version = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('e2b'))"],
        capture_output=True, text=True, check=True).stdout.strip()
    if json.loads(REQUESTS.read_text())["sdk"] != f"e2b {version}":
        pytest.skip(f"e2b {version} is not the one whose requests were noted")

    def plain(request: dict[str, Any]) -> dict[str, Any]:
        compressed = request["headers"].get("content-encoding") == "gzip"
        return {name: value for name, value in request.items()
                if not (compressed and name == "base64")}  # a gzip body holds the time

    assert list(map(plain, played[1].requests)) == list(map(plain, noted()))


def test_a_sandbox_of_one_process_is_used_and_ended_by_another(
        python: Path, cluster: LocalCluster) -> None:
    assert cluster.http is not None
    env = {"PATH": os.environ["PATH"], "E2B_API_URL": cluster.http.url,
           "E2B_SANDBOX_URL": cluster.http.url, "E2B_API_KEY": cluster.http.key}

    def run(*words: str) -> str:
        told = subprocess.run([python, "-c", *words], env=env, capture_output=True, text=True,
                              check=False)
        assert told.returncode == 0, told.stderr
        return told.stdout.strip()

    assert run(ATTACH, run(MAKE)) == "kept True"
