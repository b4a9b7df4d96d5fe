"""The unmodified SDK for JavaScript, in a folder of its own, against a real cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # a fixture installs packages
SCENARIO = Path(__file__).parents[2] / "helpers" / "e2b_scenario.mjs"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the scenario; returns what the SDK gave or threw in each step."""
    folder, npm, node = tmp_path_factory.mktemp("node"), shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    told = subprocess.run([npm, "install", "--no-audit", "--no-fund", "--engine-strict", "e2b@2"],
                          cwd=folder, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip(f"the npm package e2b cannot be installed: {told.stderr.strip()[-200:]}")
    shutil.copy(SCENARIO, folder)
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), http=True) as cluster:
        assert cluster.http is not None
        env = {"PATH": os.environ["PATH"], "E2B_API_URL": cluster.http.url,
               "E2B_SANDBOX_URL": cluster.http.url, "E2B_API_KEY": cluster.http.key}
        told = subprocess.run([node, SCENARIO.name], cwd=folder, env=env, capture_output=True,
                              text=True, timeout=500, check=False)
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    return {each["step"]: each for each in map(json.loads, told.stdout.splitlines())}


@pytest.mark.parametrize(("step", "gave"), [
    ("run", "hi 1 2\n/session\n"), ("run-streams", ["1\n", "2\n"]), ("background", True),
    ("beside", "beside\n"), ("list", [True]), ("cat-wait", "hello\ndone\n"),
    ("together", [f"{number}\n" for number in range(1, 6)]), ("write", "/tmp/a/ä 1"),
    ("read", "text"), ("read-bytes", [0, 255, 13, 10]), ("write-stream", "/tmp/stream"),
    ("ls", [["ä 1", "file", 4]]), ("events", [["new", "create"], ["new", "write"]]),
    ("signed", "1"), ("pty-heard", True), ("is-running", True), ("kill", True),
    ("kill-again", False)])
def test_the_sdk_gives_what_its_user_expects(played: dict[str, Any], step: str, gave: Any) -> None:
    assert played[step].get("gave") == gave, played[step]


@pytest.mark.parametrize(("step", "error", "text"), [
    ("run-fails", "CommandExitError", ""), ("run-timeout", "TimeoutError", ""),
    ("run-no-cwd", "InvalidArgumentError", "cwd '/nowhere' does not exist"),
    ("run-connect-none", "NotFoundError", "process with pid 9999 not found"),
    ("wait", "CommandExitError", ""), ("read-missing", "FileNotFoundError", "no such file"),
    ("watch-missing", "FileNotFoundError", "no such file"), ("pty-wait", "CommandExitError", ""),
    ("pause", "SandboxError", "cannot be paused"),
    ("no-template", "SandboxError", "template 'nothing' not found"),
    ("run-after", "SandboxNotFoundError", "")])
def test_the_sdk_throws_what_its_user_expects(played: dict[str, Any], step: str, error: str,
                                              text: str) -> None:
    told = played[step]
    assert told.get("raised") == error and text in told["text"], told


def test_exit_codes_are_the_commands(played: dict[str, Any]) -> None:
    codes = {step: played[step]["exitCode"] for step in ("run-fails", "wait", "pty-wait")}
    assert codes == {"run-fails": 3, "wait": 4, "pty-wait": 5}
