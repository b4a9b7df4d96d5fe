"""AReaL: an agent workflow whose commands run in a session, and whose reward is judged there.

    trainer.train(workflow="tangram_hpc.hooks.areal.sandbox_agent.EpisodeAgent",
                  workflow_kwargs={"settings": {"session": {"mem": "512M"}}, "temperature": 1.0})

AReaL calls `run` once for each trajectory. It gives the URL and the key of its proxy, which records
the policy's answers, as arguments (mode `inline`) or in the environment (mode `subproc`). The agent
talks to the proxy by the package `openai`, which AReaL depends on. When `run` raises an error,
AReaL rejects the trajectory; so a lost sandbox is an error here, and never a reward of 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tangram_hpc import SessionLost

from ..text_episodes import SandboxEpisode, TaskSettings


class EpisodeAgent:
    """Plays episodes of `tangram_hpc.hooks.text_episodes`, which describes the form of commands.

    Args:
        settings: the settings of every episode, by the names of `TaskSettings`.
        task_column: the column of the data with the task, as `SandboxEpisode` takes it.
        sampling: arguments of the completions, such as `temperature` or `max_completion_tokens`.

    Raises:
        InvalidInput: a setting is unknown; the message names it.
    """

    def __init__(self, settings: Any = None, task_column: str = "answer", **sampling: Any) -> None:
        self._settings = TaskSettings.of(settings or {})
        self._task_column, self._sampling = task_column, sampling

    async def run(self, data: Mapping[str, Any], **extra: Any) -> float:
        """Plays one episode with the policy.

        Args:
            data: a row of the data: `messages`, and the task in its column.
            extra: `base_url`, `api_key` and `http_client` of AReaL's proxy.

        Returns:
            The reward of the last answer: the score of the episode; 0.0 if it has no command.

        Raises:
            SessionLost: the sandbox was lost, so the episode has no reward.
            AccessError, BrokerUnreachable: there is no way to a broker.
        """
        policy = _policy(extra)
        episode = self._episode(data)
        messages = list(data["messages"])
        await episode.open_async()
        try:
            while True:
                answer = await policy.chat.completions.create(
                    messages=messages, model="default", **self._sampling)
                message = answer.choices[0].message
                turn = await episode.act_async(message.content or "")
                if turn.lost:
                    raise SessionLost(turn.observation)
                if turn.done:
                    break
                messages += [message.model_dump(exclude_none=True),
                             {"role": "user", "content": turn.observation}]
            reward = await episode.score_async() if episode.command else 0.0
            if episode.lost:
                raise SessionLost("the session was lost while the episode was scored")
            return reward
        finally:
            episode.close()

    def _episode(self, data: Mapping[str, Any]) -> SandboxEpisode:
        return SandboxEpisode(self._settings, data.get(self._task_column))


def _policy(extra: Mapping[str, Any]) -> Any:
    """Returns a client of AReaL's proxy. It repeats no request, because the proxy would record both
    answers."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=extra.get("base_url") or os.environ.get("OPENAI_BASE_URL"),
                       api_key=extra.get("api_key") or os.environ.get("OPENAI_API_KEY"),
                       http_client=extra.get("http_client"), max_retries=0)
