"""The plan file, which `tangram plan --apply` writes and a trainer reads.

Invariants: JSON in the format `tangram-plan/1`, always replaced as a whole, so a reader sees the
old plan or the new one and never a part. The file is a proposal: no process moves because of it.
The fields `modelled_s` are times without learned factors, for comparison with measured times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...atomic_file import replace_file
from ...errors import InvalidInput
from ...libra.planner.place import place
from ...libra.planner.shapes import Factors, Layout
from ...libra.planner.split import Split
from ..first_error import describe_first_error


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class BlockOf(_Part):
    """GPUs of a node; nodes and GPUs count from 0 among those that are planned."""

    node: int = Field(ge=0)
    gpus: tuple[int, ...]


class TrainingPart(_Part):
    """The training side; `blocks` has one entry for each TP group of each pipeline and replica."""

    gpus: int = Field(ge=1)
    tp: int = Field(ge=1)
    ep: int = Field(ge=1)
    pp: int = Field(ge=1)
    dp: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    expected_s: float
    modelled_s: float
    mem_gib: float
    blocks: tuple[BlockOf, ...]

    def layout(self) -> Layout:
        """Returns the layout in the planner's own type."""
        return Layout(self.tp, self.ep, self.pp, self.dp, self.micro_batch)


class InstancePart(_Part):
    """One rollout instance, and the range of total tokens of the requests that it gets."""

    degree: int = Field(ge=1)
    requests: int
    shortest: int
    longest: int
    expected_s: float
    modelled_s: float
    block: BlockOf


class BucketPart(_Part):
    """Neighbouring instances of one degree, for requests of at most `up_to_tokens` tokens."""

    degree: int = Field(ge=1)
    instances: int
    up_to_tokens: int


class PlanFile(_Part):
    """The content of a plan file."""

    format: Literal["tangram-plan/1"]
    model: str
    hardware: str
    gpus: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    expected_step_s: float
    spare: int
    costs: str
    training: TrainingPart
    rollout: tuple[InstancePart, ...] = Field(min_length=1)
    buckets: tuple[BucketPart, ...] = Field(min_length=1)

    def degrees(self) -> list[int]:
        """The degrees of the rollout instances; the instance for the shortest requests is first."""
        return [one.degree for one in self.rollout]


def plan_file(split: Split, model: str, hardware: str, gpus_per_node: int, factors: Factors,
              costs: str) -> PlanFile:
    """Returns the plan file of a split; `costs` says where its times come from."""
    blocks = place(split, gpus_per_node)
    cuts = [BlockOf(node=b.node, gpus=b.gpus) for b in blocks]
    mine = split.layout.pp * split.layout.dp
    layout, train_s = split.layout, split.price.ns / 1e9
    instances = tuple(
        InstancePart(degree=one.degree, requests=one.requests, shortest=one.shortest,
                     longest=one.longest, expected_s=one.ns / 1e9,
                     modelled_s=one.ns / 1e9 / factors.of(one.degree), block=block)
        for one, block in zip(split.instances, cuts[mine:], strict=True))
    return PlanFile(
        format="tangram-plan/1", model=model, hardware=hardware, gpus=split.gpus,
        gpus_per_node=gpus_per_node, expected_step_s=split.step_ns / 1e9, spare=split.spare,
        costs=costs, rollout=instances, buckets=_buckets(split),
        training=TrainingPart(
            gpus=layout.gpus, tp=layout.tp, ep=layout.ep, pp=layout.pp, dp=layout.dp,
            micro_batch=layout.micro, expected_s=train_s, modelled_s=train_s / factors.train,
            mem_gib=split.price.mem_bytes / 2**30, blocks=tuple(cuts[:mine])))


def write_plan(path: Path, plan: PlanFile) -> None:
    """Replaces the plan file as a whole.

    Raises:
        InvalidInput: The file cannot be written.
    """
    try:
        replace_file(path, json.dumps(plan.model_dump(), indent=1) + "\n", 0o666)
    except OSError as error:
        raise InvalidInput(f"plan file {path}: {error.strerror}") from None


def read_plan(path: Path) -> PlanFile:
    """Reads a plan file.

    Raises:
        InvalidInput: The file cannot be read or is no plan; one line.
    """
    try:
        return PlanFile.model_validate_json(path.read_text())
    except OSError as error:
        raise InvalidInput(f"plan file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"plan file {path}: not a text file") from None
    except ValidationError as error:
        raise InvalidInput(f"plan file {path}: {describe_first_error(error, PlanFile)}") from None


def _buckets(split: Split) -> tuple[BucketPart, ...]:
    found: list[BucketPart] = []
    for one in split.instances:
        count = 1
        if found and found[-1].degree == one.degree:
            count += found.pop().instances
        found.append(BucketPart(degree=one.degree, instances=count, up_to_tokens=one.longest))
    return tuple(found)
