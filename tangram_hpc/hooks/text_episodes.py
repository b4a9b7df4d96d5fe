"""Episodes of policies that act in plain text: an answer holds a command, or it ends the episode.

Some frameworks give an environment the policy's text and take text back. Their adapters share this
module. It decides how a command is found in an answer, in which sandbox it runs, when the episode
ends, and how it is scored. The adapter of each framework does the rest: its loop, tokens and masks.

A command is `<bash>...</bash>`, `<python>...</python>`, or a tool call in the form of Qwen and
Hermes, `<tool_call>{"name": "bash", "arguments": {"command": "..."}}</tool_call>`. If an answer has
several commands, only the last one is carried out. An answer without a command ends the episode.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

from tangram_hpc import BrokerUnreachable, Future, InvalidInput, Session, SessionLost
from tangram_hpc.errors import FileFailed

from .harness.session_options import seconds_of, session_options
from .process_client import SessionSlot, first_files, process_client
from .tool_answers import TEXT_MAX, answer_text

# tool -> the command that runs it, and the name of the argument that the command gets as stdin
_ARGV: Mapping[str, tuple[list[str], str]] = {
    "bash": (["bash"], "command"), "python": (["python3", "-"], "code")}
_ACTION = re.compile(r"<(bash|python|tool_call)>(.*?)</\1>", re.DOTALL)
_T = TypeVar("_T")
Steps = Generator[Future, Any, _T]  # yields futures to be awaited, and is sent their results


@dataclass(frozen=True)
class TaskSettings:
    """The settings of an episode that do not depend on its task.

    Attributes:
        session: arguments of `Client.session`.
        timeout_s: the time limit of each command, in seconds.
        max_turns: the most commands of an episode.
        answer_max: the most characters of an observation.
        command: the command that scores an episode whose task names none; empty for no score.
        command_timeout_s: the time limit of the command that scores an episode, in seconds.
    """

    session: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 30.0
    max_turns: int = 8
    answer_max: int = TEXT_MAX
    command: Any = ""
    command_timeout_s: float = 60.0

    @classmethod
    def of(cls, told: Any) -> TaskSettings:
        """Reads settings from a mapping or from attributes; a missing setting has its default. A
        value of None counts as missing.

        Raises:
            InvalidInput: a mapping has a name that is not known, or its `session` has one; or a
                number is out of range or no number.
        """
        names = list(cls.__dataclass_fields__)
        if isinstance(told, Mapping) or hasattr(told, "items"):
            values = dict(told.items())
            if unknown := sorted(set(values) - set(names)):
                raise InvalidInput(f"{unknown[0]}: not a setting of an episode; known are "
                                   f"{', '.join(names)}")
        else:
            values = {name: getattr(told, name) for name in names if hasattr(told, name)}
        values = {name: value for name, value in values.items() if value is not None}
        _check_numbers(values)
        return cls(**{**values, "session": session_options(values.get("session"))})


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Refuses a setting that is no number, such as "30", before an episode begins. Otherwise each
    command of each episode would fail for a reason that the policy cannot remove."""
    for name, value in values.items():
        if name in ("timeout_s", "command_timeout_s"):
            seconds_of(value, name)
        elif name in ("max_turns", "answer_max") and (
                not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise InvalidInput(f"{name}: {value!r} is not a whole number > 0")


@dataclass(frozen=True)
class EpisodeTurn:
    """The consequence of one answer of the policy.

    Attributes:
        observation: the text that the policy sees next; empty after an answer without a command,
            and after a command without output.
        done: whether the episode has ended.
        lost: whether it ended because its sandbox is gone.
    """

    observation: str
    done: bool
    lost: bool = False

    @property
    def shown(self) -> bool:
        """Whether the observation belongs into the policy's context. An empty one does too if the
        policy answers again: its turn marks stand between the two answers."""
        return bool(self.observation) or not self.done


def action_in(answer: str) -> tuple[list[str], str] | None:
    """Returns the command of an answer and its input; None for an answer without a command.

    Raises:
        ValueError: the tool call cannot be read; the text is for the policy.
    """
    found = _ACTION.findall(answer)
    if not found:
        return None
    name, text = found[-1]
    if name != "tool_call":
        return _ARGV[name][0], text
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        argv, wanted = _ARGV[name]
        text = arguments[wanted]
        if not isinstance(text, str):
            raise TypeError
        return argv, text
    except (ValueError, LookupError, TypeError, AttributeError):
        known = ", ".join(f"{tool}({wanted})" for tool, (_, wanted) in _ARGV.items())
        raise ValueError(f"this tool call cannot be read; known are {known}") from None


class SandboxEpisode:
    """One episode with a session of its own. Each method exists for threads and, with the suffix
    `_async`, for coroutines.

    Args:
        settings: the settings that do not depend on the task.
        task: the task of this episode: a command; or a mapping, or its JSON text, with `command`,
            `files` (path -> content, written when the session opens) and `tests` (path -> content,
            written right before the command, so that the policy never sees them). A value of None
            counts as not given.
        owner: the object whose garbage collection ends the episode; None for no such object.
    """

    def __init__(self, settings: TaskSettings, task: Any = None, owner: object | None = None
                 ) -> None:
        self.settings, self.turns, self.lost = settings, 0, False
        self._task = _task(task)
        self._slot = SessionSlot(owner)

    @property
    def command(self) -> Any:
        """The command that scores the episode; empty for none."""
        return self._task.get("command") or self.settings.command

    def open(self) -> None:
        """Requests the session; returns at once if the process has a client already.

        Raises:
            InvalidInput: an option of the session is wrong; the message names it.
            BrokerUnreachable: the broker is gone.
        """
        files = {**self.settings.session.get("files", {}), **self._task.get("files", {})}
        self._slot.open({**self.settings.session, "files": files})

    async def open_async(self) -> None:
        """Does the same as `open`, without blocking the event loop while the process connects."""
        await asyncio.to_thread(process_client)
        self.open()

    def act(self, answer: str) -> EpisodeTurn:
        """Carries out one answer of the policy. If the command fails, takes too long or cannot be
        sent, or if the sandbox is lost, the observation says so.

        Raises:
            FileFailed: a file of the task cannot be written; the data must be corrected.
        """
        return _run(self._act(answer))

    async def act_async(self, answer: str) -> EpisodeTurn:
        """Does the same as `act`, for coroutines."""
        return await _await(self._act(answer))

    def score(self) -> float:
        """Scores the episode: 1.0 if its command succeeds, else 0.0. The score is also 0.0 if the
        policy left the sandbox in a state in which the tests cannot be written, and if the sandbox
        is lost; in the latter case `lost` is True.

        Raises:
            InvalidInput: neither the task nor the settings have a command.
            FileFailed: as for `act`.
        """
        return _run(self._score())

    async def score_async(self) -> float:
        """Does the same as `score`, for coroutines."""
        return await _await(self._score())

    def close(self) -> None:
        """Closes the session; returns at once."""
        self._slot.close()

    def _act(self, answer: str) -> Steps[EpisodeTurn]:
        self.turns += 1
        last = self.turns >= self.settings.max_turns
        try:
            action = action_in(answer)
        except ValueError as error:
            return EpisodeTurn(str(error), last)
        session = self._slot.session
        if action is None or session is None:
            return EpisodeTurn("", True, self.lost)
        argv, text = action
        limit = self.settings.timeout_s
        try:
            with first_files(session) as files:
                yield from files
            result = yield session.exec(argv, stdin=text, timeout=limit, keep="both")
        except (SessionLost, BrokerUnreachable) as error:
            self.lost = True
            return EpisodeTurn(f"the session is gone: {error}", True, True)
        except InvalidInput as error:  # the text cannot be sent, e.g. half of a surrogate pair
            return EpisodeTurn(f"this command cannot be run: {error}", last)
        return EpisodeTurn(answer_text(result, limit, self.settings.answer_max), last)

    def _score(self) -> Steps[float]:
        session = self._slot.session
        if not self.command:
            raise InvalidInput("command: neither the task nor the settings have one")
        if session is None or self.lost:
            return 0.0
        try:
            with first_files(session) as files:
                yield from files
            if not (yield from _written(session, self._task.get("tests", {}))):
                return 0.0
            result = yield session.exec(self.command, timeout=self.settings.command_timeout_s,
                                        name="score")
        except (SessionLost, BrokerUnreachable):
            self.lost = True
            return 0.0
        return float(result.ok)


async def write_tests(session: Session, files: Mapping[str, Any]) -> bool:
    """Writes test files into a sandbox in which a policy has worked.

    Anything in the way of a file, such as a folder of the same name, is removed.

    Args:
        session: the sandbox.
        files: path -> content.

    Returns:
        Whether all files were written. They cannot be if the policy has changed the sandbox so.

    Raises:
        InvalidInput: a path or a content is wrong; the data must be corrected.
        SessionLost, BrokerUnreachable: the sandbox is gone.
    """
    return await _await(_written(session, files))


def _written(session: Session, files: Mapping[str, Any]) -> Steps[bool]:
    for path, content in files.items():
        try:
            yield session.write(path, content)
        except FileFailed:
            try:
                yield session.remove(path)
                yield session.write(path, content)
            except FileFailed:
                return False
    return True


def _task(told: Any) -> Mapping[str, Any]:
    """Returns the task as a mapping. A text that is not a JSON object is a command."""
    if isinstance(told, str):
        try:
            read = json.loads(told)
        except ValueError:
            return {"command": told}
        told = read if isinstance(read, Mapping) else {"command": told}
    if not isinstance(told, Mapping):
        return {}
    return {**told, "files": files_given(told.get("files")),
            "tests": files_given(told.get("tests"))}


def files_given(files: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the files that have a content. A table of data keeps the names of the files of all
    its rows in each row, with None for those that a row does not have."""
    return {path: content for path, content in (files or {}).items() if content is not None}


def _run(steps: Steps[_T]) -> _T:
    """Runs the steps to their end in this thread."""
    try:
        future = next(steps)
        while True:
            try:
                value = future.result()
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _await(steps: Steps[_T]) -> _T:
    """Runs the steps to their end in this coroutine."""
    try:
        future = next(steps)
        while True:
            try:
                value = await future
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
