"""Reads and checks a call of an engine: what `score`, `logprobs` and `generate` take.

An error concerns one call alone: `InvalidCall` is one line that names the method and the field, and
the other calls of the batch go on. A prompt, completion or text is a str, or a list of token ids.
This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Union

import msgspec

from ...ports import ServiceRequest
from ...protocol.value import decode_value

Text = Union[str, list[int]]  # noqa: UP007


class InvalidCall(Exception):
    """Raised when one call cannot be answered; its text says why in one line."""


@dataclass(frozen=True)
class ScoreRequest:
    """Asks for one number of each text, or for a list of numbers, one for each class."""

    texts: list[Text]


@dataclass(frozen=True)
class LogprobsRequest:
    """Asks for the log-probability of each token of each completion, given all tokens before it."""

    prompts: list[Text]
    completions: list[Text]


@dataclass(frozen=True)
class GenerateRequest:
    """Asks for a continuation of each prompt.

    Attributes:
        max_new_tokens: The longest continuation, tokens.
        temperature: 0 takes the most likely token; above 0 the token is drawn.
        seed: Seed of the draws; None leaves it to the engine.
    """

    prompts: list[Text]
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None


EngineRequest = Union[ScoreRequest, LogprobsRequest, GenerateRequest]  # noqa: UP007
_LISTS = ("texts", "prompts", "completions")
_MOST = 1 << 31  # the exclusive upper bound of every number in a call


def answer_count(call: EngineRequest) -> int:
    """Returns how many answers a call asks for: one for each text or prompt."""
    return len(call.texts if isinstance(call, ScoreRequest) else call.prompts)


def batch_key(call: EngineRequest) -> tuple[object, ...]:
    """Returns a key; calls with the same key may be merged into one request."""
    if isinstance(call, LogprobsRequest):
        return ("logprobs",)
    texts = call.texts if isinstance(call, ScoreRequest) else call.prompts
    kind = type(texts[0]) if texts else None
    if isinstance(call, ScoreRequest):
        return ("score", kind)
    return ("generate", kind, call.max_new_tokens, call.temperature, call.seed)


def merge_requests(many: Sequence[EngineRequest]) -> EngineRequest:
    """Returns one call that asks for everything that several calls with the same `batch_key` ask
    for, in their order.
    """
    first: Any = many[0]
    merged: EngineRequest = replace(
        first, **{name: [text for one in many for text in getattr(one, name)]
                  for name in _LISTS if hasattr(first, name)})
    return merged


def read_request(request: ServiceRequest) -> EngineRequest:
    """Returns what a call asks for, checked.

    Raises:
        InvalidCall: The method is none of the three, or a field is missing, unknown or invalid.
    """
    kind = {"score": ScoreRequest, "logprobs": LogprobsRequest,
            "generate": GenerateRequest}.get(request.method)
    if kind is None:
        raise InvalidCall(f"method: {request.method!r} is not one of score, logprobs, generate")
    try:
        given = decode_value(request.arguments)
    except msgspec.DecodeError as error:
        raise InvalidCall(f"{request.method}: arguments: not a value ({error})") from None
    if not isinstance(given, dict):
        raise InvalidCall(f"{request.method}: arguments: must be a dict of its fields")
    try:
        call: EngineRequest = kind(**given)
    except TypeError:
        known = ", ".join(field.name for field in fields(kind))
        raise InvalidCall(f"{request.method}: arguments: {_field_names(given)} "
                          f"where {known} belong") from None
    for name in _LISTS:
        if hasattr(call, name):
            _texts(request.method, name, getattr(call, name))
    if isinstance(call, LogprobsRequest) and len(call.prompts) != len(call.completions):
        raise InvalidCall(f"logprobs: completions: there are {len(call.completions)} for "
                          f"{len(call.prompts)} prompts")
    if isinstance(call, GenerateRequest):
        _sampling(call)
    return call


def _field_names(given: dict[Any, Any]) -> str:
    return ", ".join(name if isinstance(name, str) else f"a {type(name).__name__}"
                     for name in given) or "none"


def _texts(method: str, name: str, found: Any) -> None:
    def ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(t) is int and 0 <= t < _MOST for t in item)

    if not isinstance(found, list) or not (
            all(isinstance(item, str) for item in found) or all(map(ids, found))):
        raise InvalidCall(f"{method}: {name}: must be a list of str, or of lists of token ids")


def _sampling(call: GenerateRequest) -> None:
    if type(call.max_new_tokens) is not int or (
            not 0 < call.max_new_tokens < _MOST):
        raise InvalidCall("generate: max_new_tokens: must be a whole number from 1 to 2**31 - 1")
    if type(call.temperature) not in (int, float) or not (
            0 <= call.temperature < _MOST):
        raise InvalidCall("generate: temperature: must be a number, at least 0 and below 2**31")
    if call.seed is not None and (type(call.seed) is not int or not 0 <= call.seed < _MOST):
        raise InvalidCall("generate: seed: must be a whole number from 0 to 2**31 - 1, or None")
