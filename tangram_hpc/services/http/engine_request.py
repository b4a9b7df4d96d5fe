"""Pure. What a call of a model asks for: `score`, `logprobs` or `generate`, read and checked.

Law: whatever is wrong with a call is one line that names the method and the field, and is that
call's alone. A prompt, a completion or a text is a str, or the ids of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Union

import msgspec

from ...ports import ServiceRequest
from ...protocol.value import decode_value

Text = Union[str, list[int]]  # noqa: UP007


class WrongCall(Exception):
    """This one call cannot be answered; its text says why."""


@dataclass(frozen=True)
class ScoreRequest:
    """One number (or a list of them, one for each class) for each text."""

    texts: list[Text]


@dataclass(frozen=True)
class LogprobsRequest:
    """For each pair, the log-probabilities of the completion's tokens, each given all before it."""

    prompts: list[Text]
    completions: list[Text]


@dataclass(frozen=True)
class GenerateRequest:
    """A continuation of each prompt. `temperature` 0 takes the likeliest token."""

    prompts: list[Text]
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None


EngineRequest = Union[ScoreRequest, LogprobsRequest, GenerateRequest]  # noqa: UP007
_LISTS = ("texts", "prompts", "completions")
_MOST = 1 << 31  # below it lies every number of a call; others cannot even be told


def answer_count(asked: EngineRequest) -> int:
    """How many answers it wants."""
    return len(asked.texts if isinstance(asked, ScoreRequest) else asked.prompts)


def alike(asked: EngineRequest) -> tuple[object, ...]:
    """Those that say the same may go into one request."""
    if isinstance(asked, LogprobsRequest):
        return ("logprobs",)
    texts = asked.texts if isinstance(asked, ScoreRequest) else asked.prompts
    kind = type(texts[0]) if texts else None
    if isinstance(asked, ScoreRequest):
        return ("score", kind)
    return ("generate", kind, asked.max_new_tokens, asked.temperature, asked.seed)


def joined(many: Sequence[EngineRequest]) -> EngineRequest:
    """One that asks for what many do that are alike, in their order."""
    first: Any = many[0]
    return replace(first, **{name: [text for one in many for text in getattr(one, name)]
                             for name in _LISTS if hasattr(first, name)})


def read(request: ServiceRequest) -> EngineRequest:
    """What a call asks for.

    Raises:
        WrongCall: it is none of the three, or a field is wrong.
    """
    kind = {"score": ScoreRequest, "logprobs": LogprobsRequest,
            "generate": GenerateRequest}.get(request.method)
    if kind is None:
        raise WrongCall(f"method: {request.method!r} is not one of score, logprobs, generate")
    try:
        given = decode_value(request.arguments)
    except msgspec.DecodeError as error:
        raise WrongCall(f"{request.method}: arguments: not a value ({error})") from None
    if not isinstance(given, dict):
        raise WrongCall(f"{request.method}: arguments: must be a dict of its fields")
    try:
        asked: Any = kind(**given)
    except TypeError:
        known = ", ".join(field.name for field in fields(kind))
        raise WrongCall(f"{request.method}: arguments: {_names(given)} "
                        f"where {known} belong") from None
    for name in _LISTS:
        if hasattr(asked, name):
            _texts(request.method, name, getattr(asked, name))
    if isinstance(asked, LogprobsRequest) and len(asked.prompts) != len(asked.completions):
        raise WrongCall(f"logprobs: completions: {len(asked.completions)} of them for "
                        f"{len(asked.prompts)} prompts")
    if isinstance(asked, GenerateRequest):
        _sampling(asked)
    return asked


def _names(given: dict[Any, Any]) -> str:
    return ", ".join(name if isinstance(name, str) else f"a {type(name).__name__}"
                     for name in given) or "none"


def _texts(method: str, name: str, found: Any) -> None:
    def ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(t) is int and 0 <= t < _MOST for t in item)

    if not isinstance(found, list) or not (
            all(isinstance(item, str) for item in found) or all(map(ids, found))):
        raise WrongCall(f"{method}: {name}: must be a list of str, or of lists of token ids")


def _sampling(asked: GenerateRequest) -> None:
    if type(asked.max_new_tokens) is not int or (
            not 0 < asked.max_new_tokens < _MOST):
        raise WrongCall("generate: max_new_tokens: must be a whole number above 0, of 31 bits")
    if type(asked.temperature) not in (int, float) or not (
            0 <= asked.temperature < _MOST):
        raise WrongCall("generate: temperature: must be a number from 0 on, below 2**31")
    if asked.seed is not None and (type(asked.seed) is not int or not 0 <= asked.seed < _MOST):
        raise WrongCall("generate: seed: must be a whole number of 31 bits, or None")
