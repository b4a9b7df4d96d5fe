"""The adapters with the real packages of their trainers from PyPI, driven by these packages' code.

The packages go into a folder of their own, which is put in front of this environment's packages.
The short tests of an adapter then run with the real base classes, and a script uses the adapter as
the package's own loop does.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from helpers.hostile_rig import reason_to_skip
from helpers.image_rig import MadeImage
from helpers.other_python import CHECKOUT
from helpers.root_folder_rig import PROGRAMS, copy_libraries, make_image

from tangram_hpc import LocalCluster

SKYRL = ("skyrl-gym==0.4.0", "func_timeout", "omegaconf", "pandas", "requests")
# without vLLM, SGLang, Megatron: what verl's tools, agent loop and reward loop import
VERL = ("torch", "ray", "tensordict", "omegaconf", "hydra-core", "transformers", "pillow",
        "codetiming", "pandas", "datasets", "cachetools", "orjson", "uvicorn", "fastapi",
        "requests", "packaging", "aiohttp")
OPENENV = ("openenv-core==0.3.0",)
# without inference engines: what AReaL's proxy and its agent workflow import
AREAL = ("torch", "transformers<=5.3.0", "openai", "anthropic", "litellm==1.81.3", "fastapi",
         "uvicorn", "uvloop", "aiohttp", "aiofiles", "httpx", "flask", "datasets", "orjson",
         "omegaconf==2.4.0.dev2", "hydra-core==1.4.0.dev1", "pyzmq", "setproctitle", "torchdata",
         "numba", "pebble", "psutil", "colorlog", "tenacity", "lark", "ray", "pillow", "einops")
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


def installed(folder: Path, *packages: str, deps: bool = True) -> Path:
    made = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder),
         *([] if deps else ["--no-deps"]), *packages], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"{packages[0]} cannot be installed here: {made.stderr[-300:]}")
    return folder


def environ(folder: Path, also: str = "") -> dict[str, str]:
    """The variables of a program that imports the packages of a folder, and modules of another."""
    paths = [*([also] if also else []), str(folder), str(CHECKOUT), str(CHECKOUT / "tests")]
    return {**os.environ, "PYTHONPATH": ":".join(paths)}


def run(folder: Path, *words: str, cluster: LocalCluster | None = None, also: str = "") -> str:
    env = environ(folder, also)
    if cluster is not None:
        env["TANGRAM_ACCESS"] = str(cluster.access)
    done = subprocess.run([sys.executable, *words], env=env, cwd=CHECKOUT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def short_tests(folder: Path, name: str) -> None:
    told = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/hooks/{name}")
    print(told.strip().splitlines()[-1])


# ---- SkyRL --------------------------------------------------------------------------------------

EPISODE = '''
import skyrl_gym
skyrl_gym.register(id="tangram", entry_point="tangram_hpc.hooks.skyrl_gym:SandboxEnv")
env = skyrl_gym.make("tangram", env_config={"timeout_s": 20}, extras={
    "max_turns": 4, "reward_spec": {"ground_truth": "grep -qx 42 answer"}})
prompt, _ = env.init([{"role": "user", "content": "Write 42."}])
first = env.step("<python>print(42, file=open('answer', 'w'))</python>")
last = env.step("Done.")
env.close()
print(first["done"], last["done"], last["reward"], env.get_metrics())
'''


def test_skyrl_gym(tmp_path: Path) -> None:
    folder = installed(tmp_path / "skyrl", *SKYRL)
    short_tests(folder, "test_adapter_skyrl.py")
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        assert run(folder, "-c", EPISODE, cluster=cluster).strip() == "False True 1.0 {}"
        assert cluster.ask("info")["sessions"] == 0


# ---- verl ---------------------------------------------------------------------------------------

TOOLS = """
tools:
  - class_name: tangram_hpc.hooks.verl.sandbox_tool.SandboxTool
    config: {type: native, timeout_s: 2, for_scorer: true, session: {mem: 64M}}
  - class_name: tangram_hpc.hooks.verl.sandbox_tool.SandboxTool
    config: {type: native, argv: [python3, "-"], stdin: "{code}", for_scorer: true}
    tool_schema:
      type: function
      function:
        name: python
        description: Runs a program.
        parameters: {type: object, required: [code], properties: {code: {type: string}}}
"""
TURNS = '''
import asyncio, gc, json, sys
from types import SimpleNamespace
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.tool_registry import load_all_tools
from verl.utils.import_utils import load_extern_object
import tangram_hpc

loop = SimpleNamespace(tools={t.name: t for t in load_all_tools(sys.argv[1], None)},
                       max_tool_response_length=256, tool_response_truncate_side="middle")
reward = load_extern_object("pkg://tangram_hpc.hooks.verl.reward_functions", "session_score")
client = tangram_hpc.connect()

async def trajectory(number):
    data = AgentData(messages=[], image_data=[], video_data=[], audio_data=None,
                     mm_processor_kwargs=None, metrics={}, request_id=f"r{number}",
                     tools_kwargs={})
    async def call(name, **arguments):
        told, _, _ = await ToolAgentLoop._call_tool(
            loop, FunctionCall(name=name, arguments=json.dumps(arguments)), {}, data)
        return told.text
    said = [await call("bash", command=f"echo {number} > n"),
            await call("python", code="print(int(open('n').read()) * 2)"),
            await call("bash", command="sleep 60"), await call("bash", wrong=1)]
    fields = data.extra_fields
    del data, call
    gc.collect()
    score = await reward("x", "", json.dumps({"command": f"grep -qx {number} n"}), fields)
    return said, score["score"], score["sandbox_lost"]

async def batch():
    return await asyncio.gather(*(trajectory(n) for n in range(6)))

for number, (said, score, lost) in enumerate(asyncio.run(batch())):
    assert said[1:] == [str(number * 2), "[timed out after 2 s]",
                        "missing parameter 'command'"], said
    assert (score, lost) == (1.0, 0.0)
for _ in range(100):
    if client.ask("info")["sessions"] == 0:
        print("nothing left")
        break
    import time; time.sleep(0.1)
'''
SAME = '''
import asyncio, json, sys
from verl.utils.reward_score import default_compute_score
from hooks.test_adapter_verl import VERDICTS
from tangram_hpc.hooks.verl.reward_functions import compute_score

url, different = sys.argv[1], []
def plain(tests):
    """Without arrays and fields of None, which verl's own reward cannot read."""
    if isinstance(tests, dict):
        tests = {key: value for key, value in tests.items() if value is not None}
    return json.loads(json.dumps(tests, default=list))

for name, answer, tests, wanted in VERDICTS:
    theirs = default_compute_score("apps", answer, plain(tests), sandbox_fusion_url=url,
                                   memory_limit_mb=64)
    ours = asyncio.run(compute_score("apps", answer, tests, {}, memory_limit_mb=64))
    if not ours == theirs == wanted:
        different.append((name, ours, theirs, wanted))
print(len(VERDICTS), different)
'''


@pytest.fixture(scope="module", name="verl")
def verl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = installed(tmp_path_factory.mktemp("hosts") / "verl", *VERL)
    return installed(folder, "verl==0.9.1", deps=False)


def test_verls_short_tests_with_its_own_classes(verl: Path) -> None:
    short_tests(verl, "test_adapter_verl.py")


def test_verls_agent_loop_calls_the_tools_and_the_scorer_gets_the_sandbox(
        verl: Path, tmp_path: Path) -> None:
    config = tmp_path / "tools.yaml"
    config.write_text(TOOLS)
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        assert "nothing left" in run(verl, "-c", TURNS, str(config), cluster=cluster)


def test_rewards_are_those_of_verls_sandbox_fusion_path(verl: Path, tmp_path: Path) -> None:
    with LocalCluster(cpus=2, home=tmp_path / "home", http=True) as cluster:
        http = cluster.http
        assert http is not None
        url = f"{http.url.replace('://', f'://user:{http.key}@')}/run_code"
        told = run(verl, "-c", SAME, url, cluster=cluster)
    count, _, different = told.strip().splitlines()[-1].partition(" ")
    assert int(count) >= 20 and different == "[]", told


# ---- OpenEnv ------------------------------------------------------------------------------------

PLAYED = '''
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from openenv.core import GenericEnvClient
from word_env.client import WordEnv
from word_env.models import WordAction
from tangram_hpc.hooks.openenv.container_provider import SessionContainerProvider

image = sys.argv[1]

def episode(number):
    provider = SessionContainerProvider(mem="512M")
    url = provider.start_container(image)
    provider.wait_for_ready(url, timeout_s=300)
    with WordEnv(base_url=url, provider=provider, connect_timeout_s=60).sync() as env:
        assert env.reset().observation.echoed_message
        taken = env.step(WordAction(message="x" * number))
        assert env.state().step_count == 1
        return round(taken.reward, 3)

async def lost():
    provider = SessionContainerProvider(mem="512M")
    async with await GenericEnvClient.from_docker_image(image, provider=provider) as env:
        await env.reset()
        assert (await env.step({"message": "abc"})).observation["message_length"] == 3
        refused = failed = ""
        try:
            await env.step({"wrong": 1})
        except RuntimeError as error:
            refused = str(error)
        provider.session.close()
        try:
            while True:
                await env.step({"message": "x"})
                await asyncio.sleep(0.1)
        except Exception:
            pass
        for _ in range(300):  # the end of the session may be told after that of the connection
            await asyncio.sleep(0.1)
            if failed := provider.failure:
                break
    return "message" in refused, bool(failed)

print(asyncio.run(lost()))
with ThreadPoolExecutor(4) as threads:
    print(list(threads.map(episode, range(1, 5))))
'''

# what OpenEnv's web page needs, which an environment's server does not load
WEB_PAGE = ("gradio", "gradio_client", "pandas", "numpy", "numpy.libs", "PIL", "pillow.libs",
             "hf_xet", "openai")


def environment_image(packages: Path, environment: Path, place: Path) -> str:
    """Makes an image as OpenEnv's own Dockerfile lays it out, of this machine's Python; returns its
    name."""
    root = make_image(place / "root", (*PROGRAMS, "find", "sed", "head", "dirname", "tail"))
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    for path in (python, *library.glob("lib-dynload/*.so")):
        (root / str(path.parent).lstrip("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / str(path).lstrip("/"))
    shutil.copytree(packages, root / "app/.venv/packages",
                    ignore=shutil.ignore_patterns("__pycache__", *WEB_PAGE))
    copy_libraries(root, str(python), *map(str, library.glob("lib-dynload/*.so")),
                   *map(str, (root / "app").rglob("*.so")))
    shutil.copytree(library, root / str(library).lstrip("/"), dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__", "test", "config-3*",
                                                  "site-packages"))
    (root / "usr/bin/python").symlink_to(python)
    (root / "tmp").mkdir()
    shutil.copytree(environment, root / "app/env")
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as layer:
        layer.add(root, ".")
    image = MadeImage([tar.getvalue()], env=["PATH=/usr/bin:/bin",
                                             "PYTHONPATH=/app/env:/app/.venv/packages"])
    return f"oci:{image.layout(place / 'layout')}"


def test_openenvs_client_and_server(tmp_path: Path) -> None:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    folder = installed(tmp_path / "openenv", *OPENENV)
    run(folder, "-m", "openenv.cli", "init", "word_env", "-o", str(tmp_path))
    image = environment_image(folder, tmp_path / "word_env", tmp_path / "image")
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        told = run(folder, "-c", PLAYED, image, cluster=cluster, also=str(tmp_path))
        assert cluster.ask("info")["sessions"] == 0
    assert told.strip().splitlines()[-2:] == ["(True, True)", "[0.1, 0.2, 0.3, 0.4]"], told


# ---- AReaL --------------------------------------------------------------------------------------


def test_areal(tmp_path: Path) -> None:
    """Its proxy, client and agent workflow; only the policy's tokens are scripted."""
    folder = installed(tmp_path / "areal", *AREAL)
    installed(folder, "areal==1.0.4", deps=False)
    for name in ("areal_engine.py", "areal_run.py"):
        shutil.copy(CHECKOUT / "tests" / "data" / name, tmp_path)
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{folder}", "HOME": str(tmp_path),
               "TANGRAM_ACCESS": str(cluster.access)}
        done = subprocess.run([sys.executable, "-m", "areal_run", str(tmp_path / "run")], env=env,
                              cwd=tmp_path, capture_output=True, text=True, check=False)
        told = [line.removeprefix("recorded ") for line in done.stdout.splitlines()
                if line.startswith("recorded ")]
        assert done.returncode == 0 and told, done.stdout[-3000:] + done.stderr[-3000:]
        rewards = json.loads(told[0])
        assert rewards["inline"] == rewards["subproc"] == [1.0, 1.0, 1.0]
        assert rewards["lost"].startswith("SessionLost: the session is gone")
        assert cluster.ask("info")["sessions"] == 0
