"""Simulates one workload three times: all nodes held throughout, no satellites, and satellites.

`static` holds all nodes from start to end with a reservation for each trajectory, `alone` has the
job's own nodes only, and `elastic` adds satellites that come and go.

Scheduler, drivers and accounting are the same in each. Core-hours held count each node while its
worker is connected; core-hours used count the cores granted to actions. Both are computed from the
run's events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..config.allocations import alloc_policy, elastic
from ..config.first_error import describe_first_error, shortened
from ..config.settings import read_toml
from ..errors import InvalidInput
from ..scheduler.placement.placers.placer_registry import make_placer
from .message_world import Growth, MessageWorld
from .model_slurm import SlurmQueueModel
from .workload import Cluster, ClusterNode, Workload, to_ns


class ModelledQueue(BaseModel):
    """`[slurm]` of a scenario: how the modelled Slurm treats satellites."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait_s: float = Field(30.0, ge=0, description="shortest wait of a request in the queue; the "
                                                  "longest is twice that")
    nodes: int = Field(1 << 20, ge=0, description="nodes that are free for satellites")
    partitions: tuple[str, ...] = Field((), description="names of the partitions; "
                                                            "empty: any name is accepted")


def read_elastic_scenario(path: Path) -> Growth:
    """Reads a scenario: `[elastic]` as in tangram.toml, and `[slurm]`.

    Raises:
        InvalidInput: The file cannot be read or has a wrong field; one line.
    """
    told = read_toml(path)
    if unknown := next((key for key in told if key not in ("elastic", "slurm")), None):
        raise InvalidInput(f"scenario {path}: {shortened(unknown)!r} is not a known table; known "
                           "are elastic and slurm")
    policy = alloc_policy(elastic(told.get("elastic", {})))
    if not policy.max_nodes:
        raise InvalidInput(f"scenario {path}: elastic.max_nodes: say how many nodes may be asked "
                           "for")
    try:
        queue = ModelledQueue(**told.get("slurm", {}))
    except ValidationError as error:
        said = describe_first_error(error, ModelledQueue)
        raise InvalidInput(f"scenario {path}: slurm.{said}") from None
    return Growth(policy, SlurmQueueModel(to_ns(queue.wait_s), queue.nodes, queue.partitions))


def three_ways(work: Workload, cluster: Cluster, placer: str, static: str, growth: Growth,
               durations: str, seed: int = 0, check: bool = False) -> dict[str, dict[str, Any]]:
    """Metrics of `static`, `alone` and `elastic`, and the decisions about satellites.

    Raises:
        InvalidInput: Workload, cluster and policy do not go together.
    """
    ways = {"static": (_largest(cluster, growth), static, None),
            "alone": (cluster, placer, None), "elastic": (cluster, placer, growth)}
    return {name: _one(work, held, made, durations, seed, grows, check)
            for name, (held, made, grows) in ways.items()}


def _one(work: Workload, cluster: Cluster, placer: str, durations: str, seed: int,
         growth: Growth | None, check: bool) -> dict[str, Any]:
    world = MessageWorld(work, cluster, make_placer(placer), durations == "oracle", seed=seed,
                       growth=growth, check=check)
    run = world.run()
    usage, figures = world.usage.usage, run.figures()
    told: dict[str, Any] = {
        "policy": placer, "held_core_h": usage.held_ns / 3600e9,
        "used_core_h": usage.lent_ns / 3600e9,
        "used_of_held": usage.lent_ns / max(1, usage.held_ns),
        **{name: figures[name] for name in ("actions", "mean_act_s", "step_s")}}
    if growth is not None and world.slurm is not None:
        allocs = world.scheduler.ledger.allocs
        calls = world.slurm.calls()
        told |= {"satellites": allocs.asks, "slurm_held_core_h": world.slurm.held_ns() / 3600e9,
                 "slurm_calls": calls.submits + calls.queries + calls.cancels,
                 "decisions": [[at / 1e9, what] for at, what in allocs.told]}
    return told


def _largest(cluster: Cluster, growth: Growth) -> Cluster:
    """The cluster with the nodes of all satellites that may ever be requested, held from start to
    end.
    """
    shape = growth.policy.shapes[0]
    mem = shape.mem_mib or max(n.mem_mib for n in cluster.nodes)
    more = ClusterNode(name="more", count=growth.policy.max_nodes, cpus=shape.cpus, mem_mib=mem,
                       gpus=shape.gpus, sockets=1)
    return cluster.model_copy(update={"nodes": (*cluster.nodes, more)})
