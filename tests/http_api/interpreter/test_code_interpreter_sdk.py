"""The unmodified package `e2b-code-interpreter`, in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from typing import Any

import pytest

from tangram_hpc import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # a fixture installs packages
SCENARIO = """
import asyncio, json
from e2b_code_interpreter import AsyncSandbox, Sandbox

def plain(run):
    error = run.error and [run.error.name, run.error.value]
    return [run.text, "".join(run.logs.stdout), "".join(run.logs.stderr), error]

def step(name, work):
    try:
        told = work()
    except Exception as error:
        told = [type(error).__name__, str(error)]
    print(json.dumps([name, told]), flush=True)

async def many():
    boxes = await asyncio.gather(*[AsyncSandbox.create(timeout=100) for _ in range(4)])
    await asyncio.gather(*[box.run_code(f"n = {n}") for n, box in enumerate(boxes)])
    told = await asyncio.gather(*[box.run_code("n * n") for box in boxes])
    await asyncio.gather(*[box.kill() for box in boxes])
    return [run.text for run in told]

with Sandbox.create(timeout=200) as box:
    step("run", lambda: plain(box.run_code("x = 1\\nprint('hi')\\nx")))
    step("again", lambda: plain(box.run_code("x += 1\\nx", envs={"A": "b"})))
    step("error", lambda: plain(box.run_code("1 / 0")))
    heard = []
    box.run_code("import sys; print(1); print(2, file=sys.stderr); 3",
                 on_stdout=lambda told: heard.append(told.line),
                 on_stderr=lambda told: heard.append(told.line),
                 on_result=lambda told: heard.append(told.text))
    step("heard", lambda: sorted(heard))
    context = box.create_code_context(cwd="/tmp")
    step("context", lambda: plain(box.run_code("import os; os.getcwd()", context=context)))
    step("contexts", lambda: len(box.list_code_contexts()))
    step("removed", lambda: box.remove_code_context(context))
    step("gone", lambda: plain(box.run_code("1", context=context)))
    step("timeout", lambda: plain(box.run_code("import time; time.sleep(100)", timeout=1)))
    step("after", lambda: plain(box.run_code("x")))
    step("language", lambda: plain(box.run_code("1", language="r")))
    step("beside", lambda: box.commands.run("echo beside").stdout)
step("many", lambda: asyncio.run(many()))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the scenario; returns what the SDK gave or raised in each step."""
    if sys.version_info < (3, 11):
        pytest.skip("the newest package needs Python 3.11")
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    told = subprocess.run([folder / "bin" / "pip", "install", "-q", "e2b-code-interpreter<3",
                           "e2b<3"], capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip(f"e2b-code-interpreter cannot be installed: {told.stderr.strip()[-200:]}")
    with LocalCluster(cpus=4, home=tmp_path_factory.mktemp("home"), http=True) as cluster:
        assert cluster.http is not None
        env = {"PATH": os.environ["PATH"], "E2B_API_URL": cluster.http.url,
               "E2B_SANDBOX_URL": cluster.http.url, "E2B_API_KEY": cluster.http.key}
        told = subprocess.run([folder / "bin" / "python", "-c", SCENARIO], env=env, text=True,
                              capture_output=True, timeout=500, check=False)
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    return dict(map(json.loads, told.stdout.splitlines()))


@pytest.mark.parametrize(("step", "gave"), [
    ("run", ["1", "hi\n", "", None]), ("again", ["2", "", "", None]),
    ("error", [None, "", "", ["ZeroDivisionError", "division by zero"]]),
    ("heard", ["1\n", "2\n", "3"]), ("context", ["'/tmp'", "", "", None]), ("contexts", 2),
    ("removed", None), ("after", ["2", "", "", None]), ("beside", "beside\n"),
    ("many", ["0", "1", "4", "9"])])
def test_the_package_gives_what_its_user_expects(played: dict[str, Any], step: str, gave: Any
                                                 ) -> None:
    assert played[step] == gave


@pytest.mark.parametrize(("step", "error", "text"), [
    ("gone", "NotFoundException", "there is no such context"),
    ("timeout", "TimeoutException", ""), ("language", "SandboxException", "'r' is not served")])
def test_the_package_raises_what_its_user_expects(played: dict[str, Any], step: str, error: str,
                                                  text: str) -> None:
    assert played[step][0] == error and text in played[step][1]
