"""verl's reward functions: test cases of a program as actions, and tests in a trajectory's sandbox.

    reward:
      custom_reward_function:
        path: pkg://tangram_hpc.hooks.verl.reward_functions
        name: compute_score

`compute_score` judges answers that are programs; `session_score` judges the files that a trajectory
left in its sandbox. A reward function of your own attaches to the sandbox by `scoring_session`.
Nothing here imports verl.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tangram_hpc import BrokerUnreachable, InvalidInput, Session, SessionLost

from ..code_rewards import code_score
from ..process_client import process_client
from ..text_episodes import files_given, write_tests

SESSION_FIELD = "tangram_session"  # of verl's extra fields: the handle of the trajectory's session


async def compute_score(data_source: str, solution_str: str, ground_truth: Any,
                        extra_info: Mapping[str, Any] | None = None, *, timeout: float = 10.0,
                        memory_limit_mb: int = 1024, continuous: bool = True,
                        patience_s: float = 600.0, **others: Any) -> float:
    """Returns the share of its test cases that a program passes, as verl's own reward for
    `codecontests`, `apps`, `codeforces` and `taco` does with a SandboxFusion server.

    Args:
        data_source, extra_info, others: further arguments that verl passes; not used.
        solution_str: the answer, with the program in a fenced block.
        ground_truth: the test cases; see `tangram_hpc.hooks.code_rewards.cases_of`.
        timeout: the time limit of each case, in seconds; waiting does not count.
        memory_limit_mb: memory of each case, in MiB.
        continuous: whether only the first ten cases count, as verl's option of this name means it.
        patience_s: how long to look for the job's next broker, in seconds.

    Raises:
        TangramError: the reward could not be computed, for the reasons that `code_score` lists; a
            reward is never 0 because a machine failed.
    """
    return await code_score(solution_str, ground_truth, timeout=timeout, mem=memory_limit_mb,
                            continuous=continuous, patience_s=patience_s)


def compute_score_sync(*args: Any, **kwargs: Any) -> float:
    """Calls `compute_score` for verl's reward manager `remote`, which takes no coroutine
    function."""
    return asyncio.run(compute_score(*args, **kwargs))


@contextlib.asynccontextmanager
async def scoring_session(extra_info: Mapping[str, Any] | None, close: bool = True
                          ) -> AsyncIterator[Session]:
    """Attaches to the sandbox that the trajectory's tools have used, and detaches at the end.

    Args:
        extra_info: the argument of this name that verl passes to the reward function. The tool must
            have the setting `for_scorer: true`.
        close: whether the sandbox is closed at the end, because nobody needs it after the scoring.

    Raises:
        SessionLost: the trajectory has called no tool, or its sandbox is gone. This is also raised
            where the broker does not know the sandbox's token: it forgets the tokens of sandboxes
            that ended long ago, and does not know those of another job.
        BrokerUnreachable: the broker is gone.

    Example:
        async with scoring_session(extra_info) as session:
            tests = await session.exec("pytest -q", timeout=60)
    """
    handle = (extra_info or {}).get(SESSION_FIELD)
    if not handle:
        raise SessionLost("the trajectory has no sandbox: it called no tool, or the tool has no "
                          "`for_scorer: true`")
    client = await asyncio.to_thread(process_client)
    try:
        session = await asyncio.to_thread(client.attach, str(handle))
    except InvalidInput as error:
        raise SessionLost(f"the trajectory's sandbox is not known any more: {error}") from error
    try:
        yield session
    finally:
        if close:
            session.close()
        session.detach()


async def session_score(data_source: str, solution_str: str, ground_truth: Any,
                        extra_info: Mapping[str, Any] | None = None, *, command: Any = "",
                        timeout: float = 60.0, **others: Any) -> dict[str, float]:
    """Runs a command in the trajectory's sandbox: 1.0 if it succeeds, else 0.0.

    Args:
        data_source, solution_str, others: further arguments that verl passes; not used.
        ground_truth: a mapping, or its JSON text, with `command` and optionally `files` (path ->
            content). The files are written before the command runs and replace what is at their
            paths; the score is 0.0 if they cannot be written. A content of None counts as not
            given. Other keys are not used.
        extra_info: as for `scoring_session`.
        command: the command for data that has no command of its own.
        timeout: its time limit, in seconds.

    Returns:
        `score`, `acc`, and `sandbox_lost`, which is 1.0 if there was no sandbox to judge, else 0.0.

    Raises:
        InvalidInput: neither the data nor `command` has a command.
    """
    task = _mapping(ground_truth)
    line = task.get("command") or command
    if not line:
        raise InvalidInput("command: neither ground_truth nor reward_kwargs has one")
    try:
        async with scoring_session(extra_info) as session:
            if not await write_tests(session, files_given(_mapping(task.get("files")))):
                return {"score": 0.0, "acc": 0.0, "sandbox_lost": 0.0}
            result = await session.exec(line, timeout=timeout, name="session_score")
    except (SessionLost, BrokerUnreachable):
        return {"score": 0.0, "acc": 0.0, "sandbox_lost": 1.0}
    return {"score": float(result.ok), "acc": float(result.ok), "sandbox_lost": 0.0}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Returns a mapping as it is, or the mapping that a JSON text holds; an empty mapping for any
    other value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}
