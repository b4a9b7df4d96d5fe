"""AReaL's agent against a real broker, called as AReaL's workflow calls it. The policy is scripted,
behind a stand-in of the package `openai`. AReaL's own workflow is run by the long test in
`test_adapters_with_hosts.py`."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    check_restart,
    eventually,
    sessions_open,
)

from tangram_hpc import InvalidInput, LocalCluster, SessionLost
from tangram_hpc.hooks.areal.sandbox_agent import EpisodeAgent
from tangram_hpc.hooks.text_episodes import SandboxEpisode

__all__ = ["adapters_cluster"]


class Message:
    """An answer of the policy, as the package `openai` returns it."""

    def __init__(self, content: str) -> None:
        self.content = content

    def model_dump(self, exclude_none: bool) -> dict[str, Any]:
        return {"role": "assistant", "content": self.content}


class StandInOpenAI:
    """A client whose policy is `base_url`: a function from the messages to the next answer."""

    def __init__(self, base_url: Any, api_key: str, http_client: Any, max_retries: int) -> None:
        assert api_key == "key" and max_retries == 0
        self._policy = base_url
        self.chat = types.SimpleNamespace(completions=self)

    async def create(self, messages: list[Any], model: str, **sampling: Any) -> Any:
        content = await asyncio.to_thread(self._policy, list(messages), sampling)
        return types.SimpleNamespace(
            id="1", choices=[types.SimpleNamespace(message=Message(content))])


@pytest.fixture(autouse=True)
def openai(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("openai")
    vars(made)["AsyncOpenAI"] = StandInOpenAI
    monkeypatch.setitem(sys.modules, "openai", made)


class RecordedAgent(EpisodeAgent):
    """An agent that keeps its last episode."""

    def _episode(self, data: Any) -> SandboxEpisode:
        self.episode = super()._episode(data)
        return self.episode


class Trajectory:
    """A run in a thread, whose policy answers when the test says so."""

    def __init__(self, agent: RecordedAgent) -> None:
        self.agent = agent
        self.answers: queue.Queue[str] = queue.Queue()
        self.seen: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(agent,), daemon=True)
        self._thread.start()
        self.seen.get(timeout=60)

    def _run(self, agent: EpisodeAgent) -> None:
        try:
            told = asyncio.run(agent.run({"messages": [{"role": "user", "content": "a task"}]},
                                         base_url=self._policy, api_key="key", http_client=None))
            self.seen.put(f"reward {told}")
        except Exception as error:  # noqa: BLE001 - AReaL catches all, and rejects the trajectory
            self.seen.put(str(error))

    def _policy(self, messages: list[Any], sampling: dict[str, Any]) -> str:
        self.seen.put(messages[-1]["content"])
        return self.answers.get(timeout=60)

    def say(self, answer: str) -> str:
        """Answers, and returns what the policy sees next or how the run ended."""
        self.answers.put(answer)
        return self.seen.get(timeout=60)

    def end(self) -> None:
        """Answers without a command, and waits for the end."""
        self.answers.put("Done.")
        self._thread.join(60)
        assert not self._thread.is_alive()


class TestAReaL(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        return Trajectory(RecordedAgent({"timeout_s": LIMIT_S, "max_turns": 99,
                                         "session": options}))

    def call(self, trajectory: Any, line: str) -> str:
        return str(trajectory.say(f"<bash>{line}</bash>"))

    def end(self, trajectory: Any) -> None:
        trajectory.end()

    def lose(self, trajectory: Any) -> None:
        trajectory.agent.episode._slot.session.close()


def test_a_killed_broker_rejects_the_trajectory_and_the_next_one_works(tmp_path: Path) -> None:
    check_restart(TestAReaL(), tmp_path)


def play(agent: EpisodeAgent, answers: list[str], task: Any) -> tuple[float, list[Any]]:
    """Returns the reward of a run with scripted answers, and the messages of its last request."""
    told: list[Any] = []
    script = iter(answers)

    def policy(messages: list[Any], sampling: dict[str, Any]) -> str:
        told[:] = messages
        return next(script)

    data = {"messages": [{"role": "user", "content": "Write 42."}], "answer": task}
    return asyncio.run(agent.run(data, base_url=policy, api_key="key")), told


def test_an_episode_is_scored_after_its_last_answer(cluster: LocalCluster) -> None:
    agent = EpisodeAgent({"max_turns": 3}, temperature=0.5)
    answers = ["<bash>echo 42 > answer</bash>", "<bash>cat answer</bash>", "Done."]
    reward, messages = play(agent, answers, {"command": "grep -qx 42 answer"})
    assert reward == 1.0 and isinstance(reward, float)
    assert [each["role"] for each in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[-1]["content"] == "42"
    assert play(agent, answers[1:], "grep -qx 42 answer")[0] == 0.0
    assert play(agent, ["<bash>true</bash>"] * 4, "")[0] == 0.0  # ended by `max_turns`, no command
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_sandbox_that_is_lost_before_the_score_is_an_error(cluster: LocalCluster) -> None:
    agent = RecordedAgent()

    def policy(messages: list[Any], sampling: dict[str, Any]) -> str:
        agent.episode._slot.session.close()
        return "Done."

    with pytest.raises(SessionLost, match="while the episode was scored"):
        asyncio.run(agent.run({"messages": [], "answer": "true"}, base_url=policy, api_key="key"))


def test_a_setting_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidInput, match="turns"):
        EpisodeAgent({"turns": 3})
