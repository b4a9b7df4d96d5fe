"""The adapters with the real packages of their trainers from PyPI, driven by these packages' code.

The packages go into a folder of their own, which is put in front of this environment's packages.
The short tests of an adapter then run with the real base classes, and a script uses the adapter as
the package's own loop does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster

CHECKOUT = Path(__file__).resolve().parents[2]
SKYRL = ("skyrl-gym==0.4.0", "func_timeout", "omegaconf", "pandas", "requests")
# without vLLM, SGLang, Megatron: what verl's tools, agent loop and reward loop import
VERL = ("torch", "ray", "tensordict", "omegaconf", "hydra-core", "transformers", "pillow",
        "codetiming", "pandas", "datasets", "cachetools", "orjson", "uvicorn", "fastapi",
        "requests", "packaging", "aiohttp")
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


def installed(folder: Path, *packages: str, deps: bool = True) -> Path:
    made = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder),
         *([] if deps else ["--no-deps"]), *packages], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"{packages[0]} cannot be installed here: {made.stderr[-300:]}")
    return folder


def run(folder: Path, *words: str, cluster: LocalCluster | None = None, **more: str) -> str:
    env = {**os.environ, "PYTHONPATH": f"{folder}:{CHECKOUT}:{CHECKOUT / 'tests'}", **more}
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
for name, answer, tests, wanted in VERDICTS:
    theirs = default_compute_score("apps", answer, json.loads(json.dumps(tests)),
                                   sandbox_fusion_url=url, memory_limit_mb=64)
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
    assert told.strip().splitlines()[-1] == "20 []", told
