"""TRL: environments whose tools run in a sandbox each, reward functions, and tools side by side.

    class Coding(ShellEnvironment):
        options = {"mem": "512M"}

    trainer = prefetching(GRPOTrainer)(..., environment_factory=Coding,
                                       reward_funcs=reward_function("pytest -q", timeout=60))

TRL pools its environments, resets them for each batch and never closes them. Here a reset opens a
fresh session and closes the former one; when an environment is garbage-collected, its last session
is closed. TRL's tool loop waits for the calls of one rollout before it begins those of the next
rollout. A trainer class from `prefetching` begins the calls of all rollouts of a turn together.
This changes no result, because each rollout has an environment of its own.

Nothing here imports TRL: its trainer class is an argument. TRL shows every public method of an
environment to the policy as a tool, so helper methods for subclasses begin with an underscore.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tangram_hpc import BrokerUnreachable, ExecResult, Session, SessionLost
from tangram_hpc.errors import FileFailed

from .process_client import SessionSlot, first_files, lasting
from .tool_answers import TEXT_MAX, answer_text, file_error_text

_THREADS_MAX = 512  # the most rollouts of one turn whose tools run at the same time


class SandboxEnvironment:
    """An environment of one rollout, with a session of the job's broker; has no tools of its own.

    Use a subclass as `environment_factory`. Every public method of the subclass except `get_reward`
    is a tool, so it needs type hints and a docstring as TRL describes. If a tool raises an error,
    for example because its session was lost, TRL gives the error to the policy as the answer.

    Attributes:
        options: arguments of `Client.session` for each rollout. A subclass sets them.
        timeout_s: the time limit of a command for which `_run` gets no `timeout`, in seconds.
        answer_max: the most characters of an answer.
        slot: holds the session.

    Example:
        class Tests(SandboxEnvironment):
            def run_tests(self) -> str:
                '''Runs the tests of the task.'''
                return self._run("pytest -q", timeout=120)
    """

    options: Mapping[str, Any] = {}
    timeout_s: float = 30.0
    answer_max: int = TEXT_MAX

    def __init__(self) -> None:
        self.slot = SessionSlot(self)

    @property
    def session(self) -> Session:
        """The rollout's session.

        Raises:
            SessionLost: the environment was not reset yet, or not since its rollout was scored.
        """
        session = self.slot.session
        if session is None:
            raise SessionLost("this environment has no session: it was not reset, or its rollout "
                              "was scored already")
        return session

    def reset(self, **row: Any) -> str | list[Any] | None:
        """Begins a rollout: opens a session and closes that of the last rollout. Returns at once.

        Args:
            row: the columns of the rollout's data.

        Returns:
            What TRL appends to the prompt; None for nothing.

        Raises:
            BrokerUnreachable: the broker is gone.
        """
        self.slot.open(self._session_options(row))
        return None

    def _session_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `Client.session` for one row of the data. A subclass may add to
        them what the row needs, such as its `files` or its `image`."""
        return dict(self.options)

    def _run(self, command: str | Sequence[str], timeout: float | None = None,
             **options: Any) -> str:
        """Runs a command in the session and returns its output, as a tool's answer.

        Args:
            command: an argv list, or a line for the shell.
            timeout: its time limit in seconds; None for `timeout_s`.
            options: other arguments of `Session.exec`.
        """
        limit = self.timeout_s if timeout is None else timeout
        if "on_output" not in options:  # of streamed output only the beginning can be kept
            options.setdefault("keep", "both")
        result = self.session.exec(command, timeout=limit, **options).result()
        return answer_text(result, limit, self.answer_max)


class ShellEnvironment(SandboxEnvironment):
    """An environment with three tools: `bash`, `python` and `write_file`."""

    def bash(self, command: str) -> str:
        """Runs a shell command. Files stay for the next call; each call has a fresh shell.

        Args:
            command: The command line.

        Returns:
            What the command printed, and its exit code if it failed.
        """
        return self._run(["bash", "-c", command])

    def python(self, code: str) -> str:
        """Runs a Python program. Files stay for the next call; variables do not.

        Args:
            code: The program.

        Returns:
            What the program printed, and its exit code if it failed.
        """
        return self._run(["python3", "-"], stdin=code)

    def write_file(self, path: str, content: str) -> str:
        """Writes a text file.

        Args:
            path: The path, relative to the working directory or absolute.
            content: The whole content of the file.

        Returns:
            A line that says what was written.
        """
        try:
            self.session.write(path, content).result()
        except FileFailed as error:
            error.args = (file_error_text(error),)
            raise
        return f"wrote {len(content)} characters to {path}"


# ---- rewards ----------------------------------------------------------------------------------


def passed(result: ExecResult) -> float:
    """Returns 1.0 for a command that succeeded, else 0.0."""
    return float(result.ok)


def reward_function(score: str | Sequence[str] | Callable[..., Any], *,
                    grade: Callable[[ExecResult], float] = passed, name: str = "",
                    timeout: float | None = 60.0, **options: Any
                    ) -> Callable[..., Awaitable[list[float | None]]]:
    """Makes a function for TRL's `reward_funcs` that scores all rollouts of a batch together.

    Args:
        score: one of three things:
            a command, which runs in the rollout's session;
            a coroutine function, which is called in the trainer's process as
            `score(environment=..., completion=..., prompt=..., **row)` and may use
            `environment.session`;
            any other function, which is called as `score(completion=..., prompt=..., **row)` in a
            runner process on one of the job's nodes, outside of the rollouts' sessions.
        grade: turns the result of a command into the reward.
        name: the reward's name in TRL's logs and in accounting; empty for that of the function.
        timeout: the time limit of each action, in seconds; None for no limit.
        options: other arguments of `Client.submit`, such as `cpus` or `mem`.

    Returns:
        The function. If the session of a rollout was lost, its reward is None, because a lost
        session says nothing about the policy. TRL leaves a rollout out of the mean only if all its
        reward functions return None, so make all of them here. A command that failed or took too
        long is graded. Any other error is raised.

    Example:
        GRPOTrainer(..., reward_funcs=[reward_function(["pytest", "-q"], timeout=120)])
    """
    title = name or getattr(score, "__name__", "") or "tests"

    async def reward(prompts: list[Any], completions: list[Any], completion_ids: Any = None,
                     environments: Sequence[SandboxEnvironment] | None = None, **columns: Any
                     ) -> list[float | None]:
        rows = _rows(len(completions), columns)
        held = environments if environments is not None else [None] * len(completions)
        calls = [_Call(score, environment, {"completion": completion, "prompt": prompt, **row})
                 for environment, completion, prompt, row
                 in zip(held, completions, prompts, rows, strict=True)]
        limits = {"name": title, "timeout": timeout, **options}
        return list(await asyncio.gather(*(_scored(call, grade, limits) for call in calls)))

    reward.__name__ = reward.__qualname__ = title
    return reward


class _Call:
    """One rollout that is to be scored.

    Attributes:
        score: as for `reward_function`.
        environment: the rollout's environment; None if the trainer has no environments.
        values: the arguments of a function.
    """

    def __init__(self, score: Any, environment: SandboxEnvironment | None,
                 values: dict[str, Any]) -> None:
        self.score, self.environment, self.values = score, environment, values


async def _scored(call: _Call, grade: Callable[[ExecResult], float], limits: dict[str, Any]
                  ) -> float | None:
    """Returns the reward of one rollout; None if its session was lost. Raises FileFailed if its
    session lacks files that it was to begin with."""
    if isinstance(call.environment, SandboxEnvironment) and call.environment.slot.session:
        with contextlib.suppress(SessionLost, BrokerUnreachable), \
                first_files(call.environment.slot.session) as files:
            for each in files:
                await each
    if _is_lost(call.environment):  # also for a function that does not need the session
        return None
    if callable(call.score) and not inspect.iscoroutinefunction(call.score):
        return _number(await _outside(call.score, call.values, limits))
    try:
        if inspect.iscoroutinefunction(call.score):
            # a column of this name, by which TRL chooses among several factories, is left out
            return _number(await call.score(**{**call.values, "environment": call.environment}))
        if call.environment is None:
            raise TypeError("reward_function: a command needs the session of an environment; give "
                            "the trainer an environment_factory, or score with a function")
        result = await call.environment.session.exec(call.score, **limits)
    except (SessionLost, BrokerUnreachable):
        return None  # if no broker comes back, the next reset raises the error
    return _number(grade(result))


def _is_lost(environment: object) -> bool:
    """Returns whether a rollout's session has ended by itself. The environment may close it before
    the rollout is scored, which says nothing about the rollout."""
    session = environment.slot.session if isinstance(environment, SandboxEnvironment) else None
    return session is not None and session.closed.done() and bool(session.closed.result())


async def _outside(score: Callable[..., Any], values: dict[str, Any], limits: dict[str, Any]
                   ) -> Any:
    """Calls a function in a runner. If the broker is lost for good, the function is called again,
    which does no harm because it has no state."""
    return await lasting(lambda client: client.submit(score, kwargs=values, **limits))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _rows(count: int, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the data's columns as one row for each rollout. Arguments that are no column of the
    data are left out: TRL adds some that have another length, or are objects of the trainer."""
    kept = {name: values for name, values in columns.items()
            if isinstance(values, list) and len(values) == count}
    return [{name: values[i] for name, values in kept.items()} for i in range(count)]


# ---- tools of all rollouts side by side ----------------------------------------------------------


class _TurnCalls:
    """The tool calls of all rollouts of a batch. When TRL makes the first call of a turn, the calls
    of all rollouts of that turn begin.

    Args:
        completions: TRL's list of the messages of each rollout, which TRL appends to.
        tools: each rollout's tools by name, as TRL would call them; only those of environments.
        loop: the event loop of TRL's asynchronous tools; None without one.
        threads: where the calls run.
    """

    def __init__(self, completions: Sequence[list[Any]],
                 tools: Sequence[Mapping[str, Callable[..., Any]]],
                 loop: asyncio.AbstractEventLoop | None, threads: ThreadPoolExecutor) -> None:
        self._completions, self._tools = completions, tools
        self._loop, self._threads = loop, threads
        # for each rollout: the message whose calls were begun last, and the calls that TRL has not
        # taken yet
        self._begun: list[Any] = [None] * len(completions)
        self._under_way: list[list[tuple[str, Any, ThreadFuture[Any]]]] = [[] for _ in completions]

    def take(self, rollout: int, name: str, arguments: dict[str, Any]) -> ThreadFuture[Any]:
        """Returns the future of a call that TRL makes now."""
        if self._begun[rollout] is not self._completions[rollout][-1]:
            self._begin_turn()
        waiting = self._under_way[rollout]
        for each in waiting:
            if each[0] == name and each[1] == arguments:
                waiting.remove(each)
                return each[2]
        return self._threads.submit(self._call, self._tools[rollout][name], arguments)

    def instead_of(self, tables: Sequence[Mapping[str, Callable[..., Any]]],
                   make: Callable[[_TurnCalls, int, str], Callable[..., Any]]
                   ) -> list[dict[str, Callable[..., Any]]]:
        """Returns copies of TRL's tables of tools by name in which each tool of an environment is
        replaced by a function that calls `take`."""
        return [{name: make(self, rollout, name) if name in self._tools[rollout] else tool
                 for name, tool in table.items()} for rollout, table in enumerate(tables)]

    def _begin_turn(self) -> None:
        """Begins the tool calls in the last message of every rollout."""
        for rollout, messages in enumerate(self._completions):
            message = messages[-1] if messages else None
            if message is None or self._begun[rollout] is message:
                continue
            self._begun[rollout] = message
            calls = [call["function"] for call in message.get("tool_calls") or ()
                     if call.get("type") == "function"]
            known = [(call["name"], call["arguments"], ThreadFuture[Any]()) for call in calls
                     if call["name"] in self._tools[rollout]
                     and isinstance(call["arguments"], dict)]
            if known:
                self._under_way[rollout] = list(known)
                self._threads.submit(self._in_order, self._tools[rollout], known)

    def _in_order(self, tools: Mapping[str, Callable[..., Any]],
                  calls: list[tuple[str, Any, ThreadFuture[Any]]]) -> None:
        """Makes the calls of one rollout in TRL's order: the synchronous tools one after the other,
        then the asynchronous tools together."""
        later = []
        for name, arguments, future in calls:
            if inspect.iscoroutinefunction(tools[name]):
                later.append((name, arguments, future))
            else:
                _settle(future, self._call, tools[name], arguments)
        started = [(future, self._start(tools[name], arguments))
                   for name, arguments, future in later]
        for future, running in started:
            _settle(future, running.result)

    def _call(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(tool):
            return self._start(tool, arguments).result()
        return tool(**arguments)

    def _start(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> ThreadFuture[Any]:
        assert self._loop is not None, "TRL has a loop where a tool is asynchronous"

        async def call() -> Any:
            return await tool(**arguments)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)


def _settle(future: ThreadFuture[Any], call: Callable[..., Any], *arguments: Any) -> None:
    """Ends a future with the value or the error of a call."""
    try:
        future.set_result(call(*arguments))
    except BaseException as error:  # noqa: BLE001 - it is raised where TRL waits for the call
        future.set_exception(error)


def _sync_tool(turns: _TurnCalls, rollout: int, name: str) -> Callable[..., Any]:
    return lambda **arguments: turns.take(rollout, name, arguments).result()


def _async_tool(turns: _TurnCalls, rollout: int, name: str) -> Callable[..., Any]:
    async def tool(**arguments: Any) -> Any:
        return await asyncio.wrap_future(turns.take(rollout, name, arguments))
    return tool


def _owned(tools: Mapping[str, Callable[..., Any]], environment: object
           ) -> dict[str, Callable[..., Any]]:
    """Returns the tools that are methods of a rollout's own environment. Only these tools can run
    at the same time as calls of other rollouts without a change of their results."""
    return {name: tool for name, tool in tools.items()
            if getattr(tool, "__self__", None) is environment}


def prefetching(trainer_class: type) -> type:
    """Returns a subclass of a TRL trainer that runs the tools of all rollouts of a turn at once.

    The trainer is TRL's `GRPOTrainer` or a subclass, used with `environment_factory`. Rewards are
    the same as in TRL's own order, because a call sees no other rollout's environment. Tools that
    are not methods of an environment (`tools=`) run as TRL runs them. When a batch has been scored,
    the sessions of its `SandboxEnvironment`s are closed, so that they hold no memory during the
    training step.

    Args:
        trainer_class: the trainer's class.

    Raises:
        TypeError: the class has no tool loop of the form that TRL 1.16 has.

    Example:
        trainer = prefetching(GRPOTrainer)(model, environment_factory=Coding, ...)
    """
    own_loop = getattr(trainer_class, "_tool_call_loop", None)
    parameters = list(inspect.signature(own_loop).parameters)[1:5] if own_loop else []
    if parameters != ["prompts", "prompt_ids", "completion_ids", "completions"]:
        raise TypeError(f"prefetching: {trainer_class.__name__} has no tool loop as TRL 1.16's "
                        "GRPOTrainer has; use TRL 1.16, or the trainer as it is")

    class Prefetching(trainer_class):  # type: ignore[misc]
        """The trainer, with the tools of all rollouts of a turn side by side."""

        _sync_tool_dicts: Any
        _async_tool_dicts: Any

        def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any,
                            completions: Any, *rest: Any, **others: Any) -> Any:
            given = prompts, prompt_ids, completion_ids, completions, *rest
            if not self.environments:
                return super()._tool_call_loop(*given, **others)
            tables = self._sync_tool_dicts, self._async_tool_dicts
            with ThreadPoolExecutor(min(len(completions), _THREADS_MAX)) as threads:
                turns = _TurnCalls(completions, [
                    _owned({**sync, **later}, environment) for sync, later, environment
                    in zip(*tables, self.environments, strict=True)],
                    getattr(self, "async_loop", None), threads)
                self._sync_tool_dicts = turns.instead_of(tables[0], _sync_tool)
                self._async_tool_dicts = turns.instead_of(tables[1], _async_tool)
                try:
                    return super()._tool_call_loop(*given, **others)
                except BaseException:
                    # such as ^C: all calls that still run end with their sessions, because the
                    # threads that make these calls are awaited here
                    release_environments(self.environments)
                    raise
                finally:
                    self._sync_tool_dicts, self._async_tool_dicts = tables

        def _calculate_rewards(self, *args: Any, **others: Any) -> Any:
            try:
                return super()._calculate_rewards(*args, **others)
            finally:
                release_environments(self.environments or ())

    Prefetching.__name__ = Prefetching.__qualname__ = f"Prefetching{trainer_class.__name__}"
    return Prefetching


def release_environments(environments: Sequence[Any]) -> None:
    """Closes the sessions of the environments that have one; returns at once.

    Args:
        environments: environments of any class.
    """
    for each in environments:
        if isinstance(each, SandboxEnvironment):
            each.slot.close()
