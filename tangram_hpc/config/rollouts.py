"""Checks a rollout pool: `register_rollouts(name, {...})`, or `[rollouts.NAME]` in TOML.

A pool is checked before anything is sent, and an error names the wrong field in one line. Values
that were left out and depend on a service, such as its batch or its blocks, are filled in by the
broker, which knows the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from ..domain.rollouts import STEP_NS_MAX as _STEP_NS
from ..domain.rollouts import TOKEN_NS_MAX as _TOKEN_NS
from ..domain.rollouts import RolloutService, RolloutsSpec, wrong_number
from ..errors import InvalidInput
from .table_rules import SettingsTable, absolute_path, check_name, checked_table


class Bucket(SettingsTable):
    """Services of one kind, for trajectories that have at most `upto` tokens left."""

    services: tuple[str, ...] = Field(min_length=1, description="names of the services; each is "
                                                                "one instance")
    upto: int | None = Field(None, ge=1, description="largest number of remaining tokens; the last "
                                                     "bucket has none")
    degree: int = Field(0, ge=0, le=8, description="GPUs of a block; 0: the service's largest "
                                                   "degree")
    running_max: int = Field(0, ge=0, description="requests that a service runs at once; 0: its "
                                                  "batch")
    queue_max: int = Field(-1, ge=-1, description="requests that may wait at a service beyond "
                                                  "`running_max`; -1: as many as it runs")
    context_max: int = Field(0, ge=0, description="longest context in tokens; 0: no limit")
    step_ms: float = Field(0.0, ge=0, le=_STEP_NS / 1e6,
                           description="duration of a decode step in ms; 0: estimated from the "
                                       "degree")
    request_us: float = Field(0.0, ge=0, le=_STEP_NS / 1e3,
                              description="microseconds that each request adds to a decode step; "
                                          "0: estimated from the degree")
    prefill_us: float = Field(0.0, ge=0, le=_TOKEN_NS / 1e3,
                              description="microseconds of prefill per token of context; 0: "
                                          "estimated from the degree")

    @field_validator("services", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class RolloutPoolSettings(SettingsTable):
    """The fields of a rollout pool. Its costs need to be right only relative to each other."""

    buckets: tuple[Bucket, ...] = Field(min_length=1, description="the buckets, in ascending order "
                                                                  "of `upto`")
    tree: str = Field("", description="folder that keeps the learned prefix tree; empty: the tree "
                                      "ends with the broker")
    rule: Literal["nearest", "agree", "mean"] = Field(
        "nearest", description="how the bucket is chosen from the estimated mean and P90 of the "
                               "remaining tokens")
    payload_edges: tuple[int, int] = Field((1_000, 12_000),
                                           description="sizes in characters from which a tool's "
                                                       "return counts as medium, and as large")
    depth: int = Field(24, ge=1, le=1_000, description="number of tool returns in a prefix")
    least: int = Field(4, ge=1, description="trajectories that a prefix needs to be used")
    enough: int = Field(200, ge=1, description="trajectories that the newest epochs need to be "
                                               "used without older ones")
    epochs: int = Field(8, ge=1, le=1_000, description="number of epochs that are kept")
    nodes_max: int = Field(20_000, ge=16, description="number of prefixes that are kept")
    since: bool = Field(True, description="subtract the tokens that were generated since the last "
                                          "known prefix")
    transfer: bool = Field(False, description="whether the engines move KV between services")
    kv_base_ms: float = Field(10.0, ge=0, le=_STEP_NS / 1e6,
                              description="fixed cost of moving a request's KV in ms")
    kv_near_us: float = Field(8.0, ge=0, le=_TOKEN_NS / 1e3,
                              description="microseconds to move a token's KV within a node")
    kv_far_us: float = Field(18.0, ge=0, le=_TOKEN_NS / 1e3,
                             description="microseconds to move a token's KV between nodes")
    worth: int = Field(8, ge=0, description="a request moves to another bucket only if the move "
                                            "costs less than 1/worth of its remaining decode time")
    idle: int = Field(500, ge=0, description="a service counts as idle while its load lengthens a "
                                             "step by less than this, in 1/1000")
    crowded: int = Field(2000, ge=0, description="a service counts as overloaded from this "
                                                 "lengthening of a step on, in 1/1000")
    idle_s: float = Field(86_400.0, ge=1, le=1e9, description="seconds without a turn after which "
                                                             "a trajectory is forgotten")

    @field_validator("tree")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute_path(value, "the broker") if value else value


Rollouts = RolloutPoolSettings  # the former name, an alias that the next release removes


def rollouts_spec(name: str, wanted: RolloutPoolSettings | Mapping[str, Any]) -> RolloutsSpec:
    """Checks a pool and returns it as the scheduler sees it.

    A number that the broker is to fill in is 0; for `queue_max` it is -1.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    check_name("rollouts", name)
    pool = checked_table(RolloutPoolSettings, f"rollouts {name}", wanted)
    edges = [bucket.upto for bucket in pool.buckets]
    if edges[-1] is not None or None in edges[:-1]:
        raise InvalidInput(f"rollouts {name}: upto: every bucket needs one except the last, which "
                           "must have none")
    spec = RolloutsSpec(
        name, tuple(e for e in edges if e is not None),
        tuple(_service(each, number, bucket) for number, bucket in enumerate(pool.buckets)
              for each in bucket.services),
        pool.tree, pool.rule, pool.payload_edges, pool.depth, pool.least, pool.enough, pool.epochs,
        pool.nodes_max, pool.since, pool.transfer, _ns(pool.kv_base_ms, 1e6),
        _ns(pool.kv_near_us, 1e3), _ns(pool.kv_far_us, 1e3), pool.worth, pool.idle, pool.crowded,
        _ns(pool.idle_s, 1e9))
    if why := wrong_number(spec):
        raise InvalidInput(f"rollouts {name}: {why}")
    return spec


def _service(name: str, number: int, bucket: Bucket) -> RolloutService:
    return RolloutService(
        name, number, bucket.degree, bucket.running_max, bucket.queue_max, bucket.context_max,
        _ns(bucket.step_ms, 1e6), _ns(bucket.request_us, 1e3), _ns(bucket.prefill_us, 1e3))


def _ns(amount: float, unit: float) -> int:
    return round(amount * unit)
