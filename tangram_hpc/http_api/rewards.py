"""Reward URLs: `POST /reward/NAME` scores answers with a function of the user, as an action.

Two trainers call such URLs, each with its own body. OpenRLHF sends lists, `query` (prompt and
answer together), `prompts` and `labels`, and reads an object with `rewards`; with several URLs all
but the first get empty lists, and an error there costs the reward. slime sends one `prompt`,
`response` and `label`, and takes the body of the answer for the reward. Both try again after an
error.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import HTTPException
from pydantic import BaseModel, Field, model_validator

from .. import Client, InvalidInput, RemoteError, TangramError
from .awaited import GivenUp, awaited

RewardFunction = Callable[..., Any]
SAMPLES_MAX = 4096  # of one request; trainers send one or a batch


class RewardRequest(BaseModel):
    """What a trainer sends: the fields of OpenRLHF or those of slime.

    Attributes:
        query: OpenRLHF: prompt and answer together, of each sample.
        prompts: OpenRLHF: the prompts.
        labels: OpenRLHF: the labels.
        prompt: slime: the prompt, a text or a list of messages.
        response: slime: the answer.
        label: slime: the label.
    """

    query: Annotated[list[str] | None, Field(max_length=SAMPLES_MAX)] = None
    prompts: list[str] | None = None
    labels: list[Any] | None = None
    prompt: Any = None
    response: str | None = None
    label: Any = None

    @model_validator(mode="after")
    def _is_of_one_trainer(self) -> RewardRequest:
        if (self.query is None) == (self.response is None):
            raise ValueError("give either `query`, `prompts` and `labels` (OpenRLHF) or `prompt`, "
                             "`response` and `label` (slime)")
        if self.query is not None:
            for name, values in (("prompts", self.prompts), ("labels", self.labels)):
                if values is not None and len(values) != len(self.query):
                    raise ValueError(f"{name}: it has {len(values)} entries and `query` has "
                                     f"{len(self.query)}")
        return self


class Rewards:
    """Scores answers with the functions that the server was started with.

    Args:
        client: the client that submits the calls.
        functions: each function by its name in the URL. It is called with the keyword arguments
            `prompt`, `response` and `label`, and returns a number.
        timeout_s: the longest run time of one call.
    """

    def __init__(self, client: Client, functions: Mapping[str, RewardFunction],
                 timeout_s: float = 100.0) -> None:
        self._client, self._functions, self._timeout_s = client, dict(functions), timeout_s

    async def score(self, name: str, request: RewardRequest,
                    gone: Callable[[], Awaitable[object]]) -> Any:
        """Returns the body of the answer: an object for OpenRLHF, a number for slime.

        Args:
            name: the function's name in the URL.
            request: what is to be scored.
            gone: returns when the client has hung up; the calls are cancelled then.

        Raises:
            HTTPException: 404 for an unknown function; 500 with the reason if it failed; 503 if it
                could not be run now.
        """
        if name not in self._functions:
            known = ", ".join(sorted(self._functions)) or "none"
            raise HTTPException(404, f"there is no reward function {name!r:.60}; known: {known}")
        try:
            return await awaited(self._score(name, request), gone)
        except GivenUp:
            raise HTTPException(503, "the client has hung up") from None

    async def _score(self, name: str, request: RewardRequest) -> Any:
        if request.query is None:
            return await self._one(name, request.prompt, request.response or "", request.label)
        prompts = request.prompts or [""] * len(request.query)
        labels = request.labels or [None] * len(request.query)
        tasks = [asyncio.ensure_future(self._one(name, prompt, query.removeprefix(prompt), label))
                 for query, prompt, label in zip(request.query, prompts, labels, strict=True)]
        try:
            rewards = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the others, if one has failed
                task.cancel()
        value = rewards[0] if len(rewards) == 1 else list(rewards)
        return {"rewards": value, "scores": value, "extra_logs": {}}

    async def _one(self, name: str, prompt: Any, response: str, label: Any) -> float:
        try:
            future = self._client.submit(
                self._functions[name], name=f"reward.{name}", timeout=self._timeout_s,
                kwargs={"prompt": prompt, "response": response, "label": label})
            try:
                value = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        except RemoteError as error:
            raise HTTPException(500, str(error)) from None
        except TangramError as error:
            raise HTTPException(503, str(error)) from None
        if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            raise HTTPException(500, f"reward function {name} returned {value!r:.60}, which is no "
                                     "finite number")
        return float(value)


def load_function(text: str) -> RewardFunction:
    """Returns the function that `PACKAGE.MODULE:NAME` or `FILE.py:NAME` names.

    Raises:
        InvalidInput: there is no such function; the message says which part is wrong.
    """
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise InvalidInput(f"reward: {text!r:.80} is neither MODULE:FUNCTION nor FILE.py:FUNCTION")
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        raise InvalidInput(f"reward: {where}: {error}") from None
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        raise InvalidInput(f"reward: {where} has no function {name!r}")
    return function


def _of_file(path: Path) -> Any:
    """Runs a file as a module of its own. The module is not registered, so that its functions are
    sent to the workers by value."""
    spec = importlib.util.spec_from_file_location(f"tangram_reward_{path.stem}", path)
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise ImportError("there is no such file") from None
    except OSError as error:
        raise ImportError(error.strerror) from None
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
