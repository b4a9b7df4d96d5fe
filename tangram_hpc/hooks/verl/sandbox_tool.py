"""A native tool for verl: a command of the policy runs in the session of its trajectory.

verl makes and releases a tool around every call and never says that a trajectory has ended. So the
session is found by `agent_data.request_id`, and ends when verl drops the object `agent_data`. All
tools of one process share the sessions: a Python tool reads the files that a shell tool of the same
trajectory has written.

    tools:
      - class_name: tangram_hpc.hooks.verl.sandbox_tool.SandboxTool
        config: {type: native, timeout_s: 30, session: {mem: 512M}}
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from tangram_hpc import ExecResult, InvalidInput, Session, SessionLost

from ..harness.session_options import session_options
from ..process_client import first_files, process_client
from ..tool_answers import TEXT_MAX, answer_text
from ..trajectory_sessions import TrajectorySessions
from .reward_functions import SESSION_FIELD

_sessions = TrajectorySessions()  # of all tools of this process
_IDLE_S = 900.0  # after this time without a command a session ends if no scorer has closed it
_CONFIG = {"type", "session", "argv", "stdin", "timeout_s", "cpus", "answer_max", "for_scorer"}
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a shell command. Files stay for the next call; each call has a fresh "
                       "shell.",
        "parameters": {"type": "object", "required": ["command"], "properties": {
            "command": {"type": "string", "description": "The command line."}}}}}


class SandboxTool(BaseTool):
    """A tool that runs a command in the sandbox of its trajectory.

    Args:
        config: the tool's `config` of the YAML file. `argv` is the command and `stdin` its input;
            an entry "{x}" stands for the parameter x of the call. Without `argv` the command is
            `bash -c` with the parameter `command`. `session` holds arguments of `Client.session`;
            those of the tool that a trajectory calls first count. `timeout_s` (30) and `cpus` (1)
            are the time limit and the CPUs of the command, `answer_max` is the most characters of
            an answer. `for_scorer: true` shares the session with the reward function, which must
            close it.
        tool_schema: how the policy sees the tool; None for `bash(command)`.

    Raises:
        InvalidInput: the configuration, or its `session`, has a key that is not known.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
                 ) -> None:
        unknown = sorted(set(config) - _CONFIG)
        if unknown:
            raise InvalidInput(f"config: {unknown[0]!r} is not known; known are "
                               f"{', '.join(sorted(_CONFIG))}")
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_BASH))
        self._argv = list(config.get("argv", ["bash", "-c", "{command}"]))
        self._stdin = str(config.get("stdin") or "")  # YAML reads an empty value as None
        self._for_scorer = bool(config.get("for_scorer", False))
        self._session = session_options(config.get("session"))
        if self._for_scorer:
            self._session = {"idle_s": _IDLE_S, **self._session, "shared": True}
        self._timeout_s = float(config.get("timeout_s", 30.0))
        self._answer_max = int(config.get("answer_max", TEXT_MAX))
        self._cpus = config.get("cpus", 1)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
                      ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Runs the command of one call; see `BaseTool.execute`.

        Returns:
            The output and how the command ended, no reward, and a mapping with `exit_code` and
            `state`. If the session was lost, the answer says so. Every other error is raised, and
            verl turns it into the answer.
        """
        agent_data = kwargs.get("agent_data")
        trajectory = instance_id if agent_data is None else str(agent_data.request_id)
        try:
            argv = [_filled(part, parameters) for part in self._argv]
            stdin = _filled(self._stdin, parameters)
        except KeyError as error:
            return ToolResponse(text=f"missing parameter {error}"), None, {}
        try:
            await asyncio.to_thread(process_client)  # connecting takes a while
            session = _sessions.get(trajectory, self._session, agent_data, self._for_scorer)
            with first_files(session) as files:
                for each in files:
                    await each
            if self._for_scorer and agent_data is not None:
                await _show(session, agent_data.extra_fields)
            result: ExecResult = await session.exec(argv, stdin=stdin, cpus=_cpus(self._cpus),
                                                    timeout=self._timeout_s, keep="both")
        except SessionLost as error:
            return ToolResponse(text=f"the sandbox is gone: {error}"), None, {"state": "LOST"}
        text = answer_text(result, self._timeout_s, self._answer_max)
        return ToolResponse(text=text), None, {"exit_code": result.exit_code,
                                               "state": result.state.name}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends the session of this instance, if it had one because verl named no trajectory."""
        _sessions.end(instance_id)


async def _show(session: Session, fields: dict[str, Any]) -> None:
    """Puts the session's handle into the fields that verl passes to the reward function."""
    if SESSION_FIELD not in fields:
        handle = await asyncio.to_thread(session.handle, True)
        fields[SESSION_FIELD] = handle.text


def _filled(part: str, parameters: dict[str, Any]) -> str:
    """Returns a part of the command, or the value of the parameter that it stands for. Raises
    KeyError if the call has no such parameter, or null for it, or is no JSON object at all."""
    if part.startswith("{") and part.endswith("}"):
        value = parameters.get(part[1:-1]) if isinstance(parameters, dict) else None
        if value is None:
            raise KeyError(part[1:-1])
        return str(value)
    return part


def _cpus(value: Any) -> Any:
    """Turns a list of two numbers into a range, because YAML has no tuples."""
    return tuple(value) if isinstance(value, list) and len(value) == 2 else value
