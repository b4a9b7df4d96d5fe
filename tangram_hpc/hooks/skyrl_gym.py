"""SkyRL: a text environment of skyrl-gym whose commands run in a session, and a group of tools.

    import skyrl_gym
    skyrl_gym.register(id="tangram", entry_point="tangram_hpc.hooks.skyrl_gym:SandboxEnv")

Register the environment in the process of the entry point and in the Ray workers. SkyRL runs the
steps of environments in threads, at most `environment.skyrl_gym.max_env_workers` at a time, and
closes each environment in the end. If an environment is garbage-collected without a `close`, its
session is closed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

from tangram_hpc import InvalidInput, SessionLost

from .harness.session_options import seconds_of, session_options
from .process_client import SessionSlot, first_files
from .text_episodes import SandboxEpisode, TaskSettings
from .tool_answers import answer_text


class SandboxEnv(BaseTextEnv):
    """One episode in one session; `tangram_hpc.hooks.text_episodes` describes the form of commands.

    Args:
        env_config: the settings of an episode, by the names of `TaskSettings`.
        extras: the columns of the data. `reward_spec.ground_truth` is the task, as `SandboxEpisode`
            takes it; `max_turns` overrides that of the settings.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        told = dict(extras or {})
        settings = TaskSettings.of(env_config or {})
        self.max_turns = int(told.get("max_turns") or settings.max_turns)
        task = (told.get("reward_spec") or {}).get("ground_truth")
        self.episode = SandboxEpisode(_with_turns(settings, self.max_turns), task, owner=self)

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Opens the session; returns the prompt as it is."""
        self.episode.open()
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Carries out one answer of the policy, and scores the episode after the last one.

        Returns:
            The observation as a message of the user. `sandbox_lost` in `metadata` says whether the
            sandbox was lost; the reward is then 0.0 and says nothing about the policy.
        """
        turn = self.episode.act(action)
        self.turns = self.episode.turns
        reward = self.episode.score() if turn.done and self.episode.command else 0.0
        seen = [{"role": "user", "content": turn.observation}] if turn.shown else []
        return BaseTextEnvStepOutput(observations=seen, reward=reward, done=turn.done,
                                     metadata={"sandbox_lost": self.episode.lost})

    def close(self) -> None:
        """Closes the session."""
        self.episode.close()


class SandboxToolGroup(ToolGroup):
    """The tools `bash` and `python` for an environment of your own, in one session of the group.

    Args:
        session: arguments of `Client.session`; the session opens with the first call.
        timeout_s: the time limit of each call, in seconds.

    Raises:
        InvalidInput: an argument of the session is unknown, or the time limit is no number; the
            message names it.

    Example:
        self.init_tool_groups([SandboxToolGroup({"mem": "512M"})])
    """

    def __init__(self, session: Mapping[str, Any] | None = None, timeout_s: float = 30.0) -> None:
        self._options = session_options(session)
        self._timeout_s = seconds_of(timeout_s, "timeout_s")
        self._slot = SessionSlot(self)
        super().__init__(name="TangramSandbox")

    @tool  # type: ignore[untyped-decorator]
    def bash(self, command: str) -> str:
        """Runs a shell command and returns its output."""
        return self._answer(["bash"], command)

    @tool  # type: ignore[untyped-decorator]
    def python(self, code: str) -> str:
        """Runs a Python program and returns its output."""
        return self._answer(["python3", "-"], code)

    def close(self) -> None:
        """Closes the session; call it in the environment's `close`."""
        self._slot.close()

    def _answer(self, argv: list[str], text: str) -> str:
        session = self._slot.session or self._slot.open(self._options)
        try:
            with first_files(session) as files:
                for each in files:
                    each.result()
            result = session.exec(argv, stdin=text, timeout=self._timeout_s,
                                  keep="both").result()
        except SessionLost as error:
            return f"the session is gone: {error}"
        except InvalidInput as error:  # the text cannot be sent, e.g. half of a surrogate pair
            return f"this command cannot be run: {error}"
        return answer_text(result, self._timeout_s)


def _with_turns(settings: TaskSettings, turns: int) -> TaskSettings:
    return TaskSettings(**{**vars(settings), "max_turns": turns})
