"""OpenRLHF's reward file and agent file, loaded by their paths as OpenRLHF does, against a real
broker. The agent's base classes are stand-ins, because OpenRLHF needs torch, vLLM and Ray."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import openrlhf_stand_in
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    check_restart,
    eventually,
    sessions_open,
)

import tangram_hpc.hooks
from tangram_hpc import LocalCluster

__all__ = ["adapters_cluster"]

HOOKS = Path(tangram_hpc.hooks.__file__).parent


def loaded(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="agent", scope="module")
def agent_file() -> Iterator[Any]:
    if not openrlhf_stand_in.install():
        pytest.skip("OpenRLHF is installed: its own loop needs a model")
    yield loaded(HOOKS / "openrlhf_agent.py", "agent_module")
    for name in [name for name in sys.modules if name.split(".")[0] == "openrlhf"]:
        del sys.modules[name]


class TestOpenRLHF(AdapterBehaviours):
    agent: Any

    @pytest.fixture(autouse=True)
    def with_agent(self, agent: Any) -> None:
        self.agent = agent

    def begin(self, **options: Any) -> Any:
        settings = {"timeout_s": LIMIT_S, "session": options}
        instance = type("Agent", (self.agent.SandboxAgent,), {"settings": settings})()
        asyncio.run(instance.reset({"observation": "a task", "label": ""}))
        return [instance]

    def call(self, trajectory: Any, line: str) -> str:
        told = asyncio.run(trajectory[0].step({"action_text": f"<bash>{line}</bash>"}))
        text = told["environment_feedback"]
        return str(text.removeprefix("\n<observation>\n").removesuffix("\n</observation>\n"))

    def end(self, trajectory: Any) -> None:
        trajectory.clear()
        gc.collect()

    def lose(self, trajectory: Any) -> None:
        trajectory[0]._episode._slot.session.close()


def test_an_episode_in_openrlhfs_order(cluster: LocalCluster, agent: Any) -> None:
    executor = agent.AgentExecutor()
    answers = ["<bash>echo 42 > answer</bash>", "<bash>cat answer</bash>", "Done."]
    told = asyncio.run(executor.execute("Write 42.", "grep -q 42 answer", answers))
    assert told["reward"] == 1.0 and told["extra_logs"] == {"sandbox_lost": 0.0}
    silent, shown = (f"\n<observation>\n{text}\n</observation>\n" for text in ("", "42"))
    assert told["text"] == f"Write 42.{answers[0]}{silent}{answers[1]}{shown}Done."
    assert eventually(lambda: sessions_open(cluster) == 0)
    again = asyncio.run(executor.execute("Write 42.", "grep -q 42 answer", answers[1:]))
    assert again["reward"] == 0.0


def test_many_episodes_at_once_keep_apart(cluster: LocalCluster, agent: Any) -> None:
    async def all_of_them() -> list[float]:
        executor = agent.AgentExecutor()
        return [each["reward"] for each in await asyncio.gather(*(
            executor.execute("Write.", f"grep -qx {i % 2} n", [f"<bash>echo {i} > n</bash>", "."])
            for i in range(4)))]

    assert asyncio.run(all_of_them()) == [1.0, 1.0, 0.0, 0.0]
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_the_reward_file_scores_programs(cluster: LocalCluster) -> None:
    path = subprocess.run([sys.executable, "-m", "tangram_hpc.hooks.openrlhf_reward"],
                          capture_output=True, text=True, check=True).stdout.strip()
    reward = loaded(Path(path), "reward_func").reward_func
    answer, label = "```python\nprint(int(input()) * 2)\n```", '{"inputs": ["4"], "outputs": ["8"]}'
    wrong = label.replace("8", "9")
    assert reward([f"Double it. {answer}"], ["Double it. "], [label]) == {
        "rewards": 1.0, "scores": 1.0, "extra_logs": {}}
    assert reward([answer] * 2, ["", ""], [label, wrong])["rewards"] == [1.0, 0.0]
    assert reward([], [], []) == {"rewards": [], "scores": [], "extra_logs": {}}


def test_a_reward_of_ones_own_sees_prompt_answer_and_label() -> None:
    from tangram_hpc.hooks.openrlhf_reward import rewarding

    async def score(prompt: str, answer: str, label: Any) -> float:
        return float((prompt, answer, label) == ("p", "a", "l"))

    assert rewarding(score)(["pa"], ["p"], ["l"])["rewards"] == 1.0
    ends = rewarding(score, end="<|im_end|>")
    assert ends(["pa<|im_end|>", "pa"], ["p", "p"], ["l", "l"])["rewards"] == [1.0, 1.0]


@pytest.mark.long
def test_openrlhf_goes_on_with_the_jobs_next_broker(tmp_path: Path, agent: Any) -> None:
    adapter = TestOpenRLHF()
    adapter.agent = agent
    check_restart(adapter, tmp_path)
