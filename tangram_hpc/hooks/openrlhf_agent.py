"""OpenRLHF: an agent whose commands run in a session of its own, for `--train.agent_func_path`.

OpenRLHF loads this file by its path, so it has no relative imports; `python -c "import
tangram_hpc.hooks.openrlhf_agent as a; print(a.__file__)"` prints the path. For other settings write
a file with a subclass of `SandboxAgent`, and an `AgentExecutor` for it like the one at the end of
this file.

OpenRLHF makes an instance for each prompt and does not tell it when its episode is over. So the
session is closed after the last turn, or when the instance is garbage-collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from tangram_hpc.hooks.text_episodes import SandboxEpisode, TaskSettings


class SandboxAgent(AgentInstanceBase):
    """One episode, whose task is the label (`SandboxEpisode` says what a task is).

    Attributes:
        settings: the settings of every episode, by the names of `TaskSettings`; a subclass sets
            them.
        before, after: the text before and after an observation in the policy's context. A subclass
            sets them to the turn marks of its model's chat template.
    """

    settings: Mapping[str, Any] = {}
    before, after = "\n<observation>\n", "\n</observation>\n"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._episode: SandboxEpisode | None = None

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Opens the session; returns the observation as it is."""
        settings = TaskSettings.of(self.settings)
        self._episode = SandboxEpisode(settings, states.get("label"), owner=self)
        await self._episode.open_async()
        return {"observation": states["observation"]}

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Carries out one answer of the policy, and scores the episode after the last one."""
        episode = self._episode
        assert episode is not None, "OpenRLHF resets an instance before its first step"
        turn = await episode.act_async(state_dict["action_text"])
        reward = 0.0
        if turn.done:
            try:
                reward = await episode.score_async() if episode.command else 0.0
            finally:
                episode.close()
        feedback = f"{self.before}{turn.observation}{self.after}" if turn.shown else ""
        return {"rewards": np.float64(reward), "scores": reward, "environment_feedback": feedback,
                "done": turn.done, "sampling_params": state_dict.get("sampling_params"),
                "extra_logs": {"sandbox_lost": float(episode.lost)}}


class AgentExecutor(MultiTurnAgentExecutor):
    """The executor of `SandboxAgent`; OpenRLHF looks for a class of this name."""

    def __init__(self) -> None:
        super().__init__(SandboxAgent)
