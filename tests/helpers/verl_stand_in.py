"""verl's classes that the adapter has as bases: verl's own where it is installed, else stand-ins.

The stand-ins have the signatures and the order of verl 0.9.1; `call_tool` is the part of its agent
loop that calls a tool. The long suite drives verl's own loop.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from typing import Any


class BaseTool:
    """The base class of native tools."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        return instance_id or "instance", ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


class ToolResponse:
    """The answer of a tool."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text


class OpenAIFunctionToolSchema:
    """The schema of a tool."""

    @classmethod
    def model_validate(cls, told: dict[str, Any]) -> Any:
        function = types.SimpleNamespace(**told["function"])
        return types.SimpleNamespace(type=told["type"], function=function)


class NaiveRewardManager:
    """The reward manager `naive`, without a tokenizer: the answer is a text."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.compute_score = compute_score

    async def run_single(self, data: Any) -> dict[str, Any]:
        fields = data[-1:][0].non_tensor_batch
        extra_info = {**fields["extra_info"], **(fields.get("tool_extra_fields") or {})}
        score = await self.compute_score(data_source="", solution_str="", ground_truth=None,
                                         extra_info=extra_info)
        return {"reward_score": score, "reward_extra_info": {"acc": score}}


def install() -> bool:
    """Makes the stand-ins importable as verl, unless it is installed; returns whether it did."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return False
    manager = "verl.experimental.reward_loop.reward_manager"
    for name, content in (
            ("verl", {}), ("verl.tools", {}), ("verl.tools.base_tool", {"BaseTool": BaseTool}),
            ("verl.tools.schemas", {"ToolResponse": ToolResponse,
                                    "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema}),
            ("verl.experimental", {}), ("verl.experimental.reward_loop", {}), (manager, {}),
            (f"{manager}.naive", {"NaiveRewardManager": NaiveRewardManager})):
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
    return True


class Trajectory:
    """verl's agent data: the object that stands for a trajectory and is dropped at its end."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.extra_fields: dict[str, Any] = {}


async def call_tool(tool: Any, arguments: dict[str, Any], trajectory: Trajectory) -> str:
    """Makes one call of a tool, as `ToolAgentLoop._call_tool` does."""
    instance = None
    try:
        instance, _ = await tool.create(create_kwargs={})
        answer, _, _ = await tool.execute(instance, json.loads(json.dumps(arguments)),
                                          agent_data=trajectory)
    except Exception as error:  # noqa: BLE001 - as verl does
        return f"Error executing tool {tool.name!r}: {error}"
    finally:
        if instance is not None:
            await tool.release(instance)
    return str(answer.text)
