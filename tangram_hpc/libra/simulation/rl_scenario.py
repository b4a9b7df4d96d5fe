"""Reads an RL scenario: all assumptions of a simulated asynchronous RL run, in one TOML file.

Invariants: every assumption is a field with its unit in its name, and none is made anywhere else.
An unknown or wrong field is reported in one line that names the file, the field and the remedy.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ...config.first_error import first_error
from ...config.planner.files import read_hardware, read_model
from ...config.planner.planner_settings import PlannerSettings, planner_settings
from ...config.settings import read_toml
from ...errors import InvalidInput
from ...scheduler.routing.cmlfq import TreeLimits
from ...scheduler.routing.rollout_router import KvCost
from ..hybrid.hybrid_signal import PoolRules
from ..planner.shapes import Hardware, ModelShape, Rollout, Training
from .rl_faults import Faults
from .rl_lengths import Causes

FORMAT = "tangram-rl/1"
BATCHES, TRAJECTORIES = "batches", "trajectories"  # see `rl_pipeline`


@dataclass(frozen=True)
class RunSection:
    """The size and the pipeline of the run.

    Attributes:
        gpus: GPUs of both stages.
        iterations: Number of batches.
        prompts, samples: A batch has `prompts` x `samples` trajectories.
        train_steps: Optimizer steps in which a batch is trained.
        pipeline: What is asynchronous: whole `batches` or `trajectories`.
        staleness: A batch may roll out while at most this many older batches are not trained.
        warmup: Number of first iterations that are not in the metrics.
        seed: Seed of all random draws.
        slack: Fraction by which the planner may lengthen the step to leave more GPUs to rollout.
        pool_slack: The same for systems with the hybrid pool, which lends such GPUs to training.
    """

    gpus: int
    iterations: int
    prompts: int
    samples: int
    train_steps: int
    pipeline: str = BATCHES
    staleness: int = 1
    warmup: int = 1
    seed: int = 7
    slack: float = 0.0
    pool_slack: float = 0.0


@dataclass(frozen=True)
class Pauses:
    """How long changes take, in seconds.

    Attributes:
        weights_s: the rollout engines load new weights; once for each batch.
        to_rollout_s, to_train_s: GPUs change to the other stage.
        reconfigure_s: all GPUs change to another split.
    """

    weights_s: float
    to_rollout_s: float
    to_train_s: float
    reconfigure_s: float


@dataclass(frozen=True)
class Baselines:
    """Settings of the baselines.

    Attributes:
        uniform_degree: The degree of static-uniform and greedy.
        greedy_ratio: Ratio of the stages' times at or above which greedy moves a node.
    """

    uniform_degree: int = 2
    greedy_ratio: float = 1.25


@dataclass(frozen=True)
class Scenario:
    """A whole scenario, checked."""

    name: str
    run: RunSection
    model: ModelShape
    hardware: Hardware
    training: Training
    rollout: Rollout
    lengths: Causes
    pauses: Pauses
    baselines: Baselines
    planner: PlannerSettings
    pool: PoolRules
    router: KvCost
    tree: TreeLimits
    faults: Faults = field(default_factory=Faults)

    @property
    def batch(self) -> int:
        """Number of trajectories of a batch."""
        return self.run.prompts * self.run.samples


@dataclass(frozen=True)
class _File:
    """A scenario file; `model` and `hardware` are files or names of shipped ones."""

    name: str
    model: str
    run: RunSection
    lengths: Causes
    pauses: Pauses
    baselines: Baselines = field(default_factory=Baselines)
    planner: dict[str, Any] = field(default_factory=dict)
    pool: PoolRules = field(default_factory=PoolRules)
    router: KvCost = field(default_factory=KvCost)
    tree: TreeLimits = field(default_factory=TreeLimits)
    faults: Faults = field(default_factory=Faults)


_T = TypeVar("_T")


def read_rl_scenario(path: Path) -> Scenario:
    """Reads a scenario.

    Raises:
        InvalidInput: The file is wrong; one line with the file, the field and the fault.
    """
    told = read_toml(path, "scenario")
    where = f"scenario {path}"
    if told.pop("format", None) != FORMAT:
        raise InvalidInput(f"{where}: field `format` must be {FORMAT!r}")
    _numbers(told, where, "")
    of = checked_section(_File, told, where)
    planner = planner_settings(of.planner)
    model = read_model(_beside(path, of.model))
    job = replace(model.job(), batch=of.run.prompts * of.run.samples, steps=of.run.train_steps)
    hardware = read_hardware(_beside(path, planner.hardware)).hardware()
    scenario = Scenario(
        of.name, of.run, model.shape(), hardware, job, model.engine(), of.lengths, of.pauses,
        of.baselines, planner, of.pool, of.router, of.tree, of.faults)
    _check(scenario, where)
    return scenario


def with_run(scenario: Scenario, run: RunSection) -> Scenario:
    """The scenario with another run.

    Raises:
        InvalidInput: The result cannot be simulated.
    """
    job = replace(scenario.training, batch=run.prompts * run.samples, steps=run.train_steps)
    changed = replace(scenario, run=run, training=job)
    _check(changed, f"scenario {scenario.name}")
    return changed


def _beside(path: Path, name: str) -> str:
    """The path of a file in the scenario's folder; if there is none, the name itself."""
    there = path.parent / name
    return str(there) if there.suffix == ".toml" and there.exists() else name


def checked_section(kind: type[_T], values: dict[str, Any], where: str) -> _T:
    """Makes a dataclass of these values and refuses unknown fields, nested ones too.

    Raises:
        InvalidInput: A field is unknown or wrong; one line.
    """
    _known(kind, values, where, "")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        field, said = first_error(error)
        raise InvalidInput(f"{where}: field `{field}`: {said}") from None


def _known(kind: Any, values: dict[str, Any], where: str, under: str) -> None:
    """Checks that every key is a field, in nested tables too."""
    names = {f.name: f.type for f in fields(kind)}
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean `{under}{near[0]}`?" if near else ""
            raise InvalidInput(f"{where}: field `{under}{key}` is not known{hint}")
        if isinstance(value, dict):
            part = _PARTS.get(str(names[key]))
            if part is not None:
                _known(part, value, where, f"{under}{key}.")


_PARTS: dict[str, Any] = {c.__name__: c for c in (
    RunSection, Causes, Pauses, Baselines, PoolRules, KvCost, TreeLimits, Faults)}


def _numbers(value: Any, where: str, place: str) -> None:
    """Checks that no number is negative, infinite or NaN."""
    if isinstance(value, dict):
        for name, under in value.items():
            _numbers(under, where, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for under in value:
            _numbers(under, where, place)
    elif isinstance(value, int | float) and not 0 <= value < math.inf:
        raise InvalidInput(f"{where}: field `{place}`: {value} must be finite and at least 0")


def _check_pauses(s: Scenario, where: str) -> None:
    """Checks that a change of stage is shorter than the pool's timeout."""
    for name in ("to_rollout_s", "to_train_s"):
        if getattr(s.pauses, name) * 1e9 >= s.pool.stage_timeout_ns:
            raise InvalidInput(f"{where}: field `pauses.{name}`: must be less than "
                               f"`pool.stage_timeout_ns` ({s.pool.stage_timeout_ns / 1e9:g} s)")


def _check_lengths(s: Scenario, where: str) -> None:
    """Checks that trajectories can be drawn."""
    for name in ("prompt_tokens", "first_tokens", "generated_max"):
        if getattr(s.lengths, name) < 1:
            raise InvalidInput(f"{where}: field `lengths.{name}`: must be at least 1")
    if not s.lengths.tool_s:
        raise InvalidInput(f"{where}: field `lengths.tool_s`: must be above 0")
    for phase in s.lengths.phases:
        if min(*phase.tokens, phase.turns, phase.payload, phase.steady) < 1:
            raise InvalidInput(f"{where}: field `lengths.phases`: {phase.name}: tokens, turns, "
                               "payload and steady are at least 1")
    if any(sum(p.weight[end] for p in s.lengths.phases) <= 0 for end in (0, 1)):
        raise InvalidInput(f"{where}: field `lengths.phases`: weight: at the beginning and at the "
                           "end of the run one phase must be above 0")


def _check_faults(s: Scenario, where: str) -> None:
    """Checks that a run can survive the faults."""
    for name in ("step", "tool"):
        if getattr(s.faults, name) >= 1:
            raise InvalidInput(f"{where}: field `faults.{name}`: must be a share below 1")
    for name in ("node_s", "engine_s", "back_s", "tool_timeout_s"):
        if 0 < getattr(s.faults, name) < 1:
            raise InvalidInput(f"{where}: field `faults.{name}`: must be 0 or at least 1 s")


def _check(s: Scenario, where: str) -> None:
    """Checks all conditions that the types of the fields do not express."""
    _check_pauses(s, where)
    _check_faults(s, where)
    for name in ("gpus", "iterations", "prompts", "samples", "train_steps", "staleness"):
        if getattr(s.run, name) < 1:
            raise InvalidInput(f"{where}: field `run.{name}`: must be at least 1")
    if s.run.pipeline not in (BATCHES, TRAJECTORIES):
        raise InvalidInput(f"{where}: field `run.pipeline`: {BATCHES!r} or {TRAJECTORIES!r}")
    if s.run.gpus % s.hardware.gpus_per_node or s.run.gpus < 2 * s.hardware.gpus_per_node:
        raise InvalidInput(f"{where}: field `run.gpus`: whole nodes of "
                           f"{s.hardware.gpus_per_node}, two at least")
    if not 0 <= s.run.warmup < s.run.iterations:
        raise InvalidInput(f"{where}: field `run.warmup`: less than `run.iterations`")
    if s.batch % s.run.train_steps:
        raise InvalidInput(f"{where}: field `run.train_steps`: must divide the batch of {s.batch}")
    if not s.lengths.phases or s.lengths.prompts < s.run.prompts:
        raise InvalidInput(f"{where}: field `lengths`: at least one phase, and as many prompts as "
                           "a batch has")
    _check_lengths(s, where)
    if s.baselines.uniform_degree not in s.rollout.degrees:
        raise InvalidInput(f"{where}: field `baselines.uniform_degree`: one of "
                           f"{list(s.rollout.degrees)}")
    if s.planner.granularity % s.hardware.gpus_per_node:
        raise InvalidInput(f"{where}: field `planner.granularity`: whole nodes of "
                           f"{s.hardware.gpus_per_node} GPUs are moved")
