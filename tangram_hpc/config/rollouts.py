"""Checks a rollout pool: `register_rollouts(name, {...})`, or `[rollouts.NAME]` in TOML.

It is checked before anything is sent, and an error names the wrong field in one line. Values that
were left out and depend on a service, such as its batch or its blocks, are filled in by the broker,
which knows the service.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..domain.rollouts import STEP_NS_MAX as _STEP_NS
from ..domain.rollouts import TOKEN_NS_MAX as _TOKEN_NS
from ..domain.rollouts import RolloutService, RolloutsSpec, wrong_number
from ..errors import InvalidInput
from .first_error import describe_first_error


class Bucket(BaseModel):
    """Services of one kind, for trajectories that have at most `upto` tokens left."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    services: tuple[str, ...] = Field(min_length=1, description="names of services; each is one "
                                                                "instance")
    upto: int | None = Field(None, ge=1, description="tokens left, at most; the last bucket: none")
    degree: int = Field(0, ge=0, le=8, description="GPUs of a block; 0: the service's largest")
    running_max: int = Field(0, ge=0, description="requests at once; 0: the service's batch")
    queue_max: int = Field(-1, ge=-1, description="requests that wait at it beyond those; -1: as "
                                                  "many as run")
    context_max: int = Field(0, ge=0, description="tokens of the longest context; 0: any")
    step_ms: float = Field(0.0, ge=0, le=_STEP_NS / 1e6, description="a decode step; 0: a guess by "
                                                                    "the degree")
    request_us: float = Field(0.0, ge=0, le=_STEP_NS / 1e3, description="what each request adds to "
                                                                       "it; 0: a guess")
    prefill_us: float = Field(0.0, ge=0, le=_TOKEN_NS / 1e3, description="a token of context read "
                                                                        "anew; 0: a guess")

    @field_validator("services", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class RolloutPoolSettings(BaseModel):
    """A rollout pool. Its costs need to be right only relative to each other."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    buckets: tuple[Bucket, ...] = Field(min_length=1, description="by `upto`, the smallest first")
    tree: str = Field("", description="folder that keeps what is learned; empty: it goes with the "
                                      "broker")
    rule: Literal["nearest", "agree", "mean"] = Field(
        "nearest", description="to which of the buckets that mean and P90 name a trajectory goes")
    payload_edges: tuple[int, int] = Field((1_000, 12_000), description="first sizes of a medium "
                                                                        "and a large return")
    depth: int = Field(24, ge=1, le=1_000, description="returns that are looked at")
    least: int = Field(4, ge=1, description="trajectories that make a prefix known")
    enough: int = Field(200, ge=1, description="the newest epochs with so many are believed")
    epochs: int = Field(8, ge=1, le=1_000, description="epochs that are kept")
    nodes_max: int = Field(20_000, ge=16, description="prefixes that are kept")
    since: bool = Field(True, description="take off what was generated since a known prefix")
    transfer: bool = Field(False, description="the engines move KV between services")
    kv_base_ms: float = Field(10.0, ge=0, le=_STEP_NS / 1e6, description="moving a request's KV: "
                                                                        "fixed part")
    kv_near_us: float = Field(8.0, ge=0, le=_TOKEN_NS / 1e3, description="of a token within a node")
    kv_far_us: float = Field(18.0, ge=0, le=_TOKEN_NS / 1e3,
                             description="of a token between nodes")
    worth: int = Field(8, ge=0, description="a move between buckets costs less than this part of "
                                            "what is left to decode")
    idle: int = Field(500, ge=0, description="a service idles while its step is longer by less, "
                                             "1/1000")
    crowded: int = Field(2000, ge=0, description="and is crowded from this on, 1/1000")
    idle_s: float = Field(86_400.0, ge=1, le=1e9, description="forget a trajectory that rests so "
                                                             "long")

    @field_validator("tree")
    @classmethod
    def _absolute(cls, value: str) -> str:
        path = os.path.expanduser(value)
        if value and not os.path.isabs(path):
            raise ValueError(f"{value!r} must be an absolute path: the broker has another working "
                             "directory")
        return path


Rollouts = RolloutPoolSettings  # the name until this release; goes with the next one


def rollouts_spec(name: str, wanted: RolloutPoolSettings | Mapping[str, Any]) -> RolloutsSpec:
    """Returns what the scheduler needs of a pool.

    Where the broker fills a number in, it is 0, or -1 for `queue_max`.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    if not name or any(c.isspace() for c in name):
        raise InvalidInput(f"rollouts name: {name!r} must be one word")
    told = wanted if isinstance(wanted, RolloutPoolSettings) else _checked(name, wanted)
    edges = [bucket.upto for bucket in told.buckets]
    if edges[-1] is not None or None in edges[:-1]:
        raise InvalidInput(f"rollouts {name}: upto: every bucket but the last has one, the last "
                           "none")
    spec = RolloutsSpec(
        name, tuple(e for e in edges if e is not None),
        tuple(_service(each, number, bucket) for number, bucket in enumerate(told.buckets)
              for each in bucket.services),
        told.tree, told.rule, told.payload_edges, told.depth, told.least, told.enough, told.epochs,
        told.nodes_max, told.since, told.transfer, _ns(told.kv_base_ms, 1e6),
        _ns(told.kv_near_us, 1e3), _ns(told.kv_far_us, 1e3), told.worth, told.idle, told.crowded,
        _ns(told.idle_s, 1e9))
    if why := wrong_number(spec):
        raise InvalidInput(f"rollouts {name}: {why}")
    return spec


def _service(name: str, number: int, bucket: Bucket) -> RolloutService:
    return RolloutService(
        name, number, bucket.degree, bucket.running_max, bucket.queue_max, bucket.context_max,
        _ns(bucket.step_ms, 1e6), _ns(bucket.request_us, 1e3), _ns(bucket.prefill_us, 1e3))


def _ns(amount: float, unit: float) -> int:
    return round(amount * unit)


def _checked(name: str, wanted: Mapping[str, Any]) -> RolloutPoolSettings:
    try:
        return RolloutPoolSettings(**wanted)
    except ValidationError as error:
        raise InvalidInput(
            f"rollouts {name}: {describe_first_error(error, RolloutPoolSettings)}") from None
