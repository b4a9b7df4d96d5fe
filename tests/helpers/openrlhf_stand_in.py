"""The part of OpenRLHF's agent module that calls environments: OpenRLHF needs torch, vLLM and Ray.

The loop has the order of OpenRLHF 0.11: reset, then generate and step until `done`, and nobody
closes an instance. The policy's answers come from the caller.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any


class AgentInstanceBase:
    """The base class of environments."""


class MultiTurnAgentExecutor:
    """Plays episodes with an instance for each prompt."""

    def __init__(self, agent_instance_cls: type) -> None:
        assert issubclass(agent_instance_cls, AgentInstanceBase)
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, prompt: str, label: Any, answers: list[str]) -> dict[str, Any]:
        instance: Any = self.agent_instance_cls()
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        reward, logs = 0.0, {}
        for answer in answers:
            told = await instance.step({"observation_text": text, "action_text": answer,
                                        "label": label, "sampling_params": None})
            reward += told["rewards"].item()
            logs = told.get("extra_logs", {})
            text += answer + told["environment_feedback"]
            if told["done"]:
                break
        return {"text": text, "reward": reward, "extra_logs": logs}


def install() -> bool:
    """Makes the stand-ins importable as OpenRLHF, unless it is installed; returns whether it did.
    """
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return False
    for name, content in (("openrlhf", {}), ("openrlhf.utils", {}),
                          ("openrlhf.utils.agent", {
                              "AgentInstanceBase": AgentInstanceBase,
                              "MultiTurnAgentExecutor": MultiTurnAgentExecutor})):
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
    return True
