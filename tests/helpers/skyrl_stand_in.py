"""skyrl-gym's base classes: its own where it is installed, else stand-ins with the same methods."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any


class BaseTextEnv:
    """The base class of text environments."""

    def __init__(self) -> None:
        self.turns, self.max_turns = 0, 1
        self.tool_groups: list[Any] = []

    def init_tool_groups(self, tool_groups: list[Any]) -> None:
        self.tool_groups = tool_groups

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        group = next(one for one in self.tool_groups if one.name == tool_group_name)
        return group.execute_tool(tool_name, *tool_input)


class Tool:
    """The decorator of a group's methods."""

    def __init__(self, func: Any) -> None:
        self.func, self.name = func, func.__name__

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        return lambda *args: self.func(instance, *args)


class ToolGroup:
    """A group of tools."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tools = {n: getattr(self, n) for n in dir(type(self))
                      if isinstance(getattr(type(self), n), Tool)}

    def execute_tool(self, name: str, *args: Any) -> Any:
        return self.tools[name](*args)


def install() -> bool:
    """Makes the stand-ins importable as skyrl-gym, unless it is installed; returns whether it did.
    """
    if "skyrl_gym" in sys.modules or importlib.util.find_spec("skyrl_gym") is not None:
        return False
    for name, content in (
            ("skyrl_gym", {}), ("skyrl_gym.envs", {}), ("skyrl_gym.tools", {}),
            ("skyrl_gym.envs.base_text_env", {"BaseTextEnv": BaseTextEnv,
                                              "BaseTextEnvStepOutput": dict}),
            ("skyrl_gym.tools.core", {"ToolGroup": ToolGroup, "tool": Tool})):
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
    return True
