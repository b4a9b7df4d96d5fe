"""Model and hardware files (TOML), histories of lengths and measured steps (JSON lines).

A file is checked as a whole before anything is planned; a wrong field is reported in one line that
names the file and the field. A name without a suffix is one of the shipped examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...errors import InvalidInput
from ...libra.planner.shapes import Hardware, ModelShape, Request, Rollout, Training
from ..first_error import describe_first_error
from ..settings import read_toml
from ..table_rules import SettingsTable

EXAMPLES = Path(__file__).resolve().parent / "examples"
DEGREES = (1, 2, 4, 8)
TOKENS_MOST, BATCH_MOST, PARAMS_MOST = 1 << 22, 1 << 16, 10**15  # sums stay within 64 bits
_FileT = TypeVar("_FileT", bound=BaseModel)


class TrainingTable(SettingsTable):
    """`[training]` of a model file."""

    batch: int = Field(ge=1, le=BATCH_MOST, description="sequences of a training step")
    micro_batches: tuple[int, ...] = Field((1, 2, 4, 8), min_length=1)
    degrees: tuple[int, ...] = Field(DEGREES, min_length=1, description="degrees of tensor "
                                                                        "parallelism")
    zero: int = Field(1, ge=0, le=3)
    recompute: bool = True
    forward_passes: int = Field(1, ge=0, le=8, description="forward passes for log-probabilities, "
                                                           "of the old policy and the reference")
    grad_bytes: int = Field(4, ge=1, le=8)
    optimizer_bytes: int = Field(12, ge=0, le=32)
    logit_chunk: int = Field(4096, ge=1)


class RolloutTable(SettingsTable):
    """`[rollout]` of a model file."""

    degrees: tuple[int, ...] = Field(DEGREES, min_length=1)
    max_batch: int = Field(256, ge=1, description="sequences that an engine decodes at once")
    kv_loss: float = Field(0.04, ge=0, lt=1)


class LengthsTable(SettingsTable):
    """`[lengths]` of a model file: the lengths that the planner assumes until it has a history.

    Each list holds quantiles at equal distances, from the shortest request to the longest.
    """

    prompt: tuple[int, ...] = Field(min_length=1)
    generated: tuple[int, ...] = Field(min_length=1)
    tool_s: tuple[float, ...] = (0.0,)

    @model_validator(mode="after")
    def _ascends(self) -> LengthsTable:
        for name in ("prompt", "generated", "tool_s"):
            values = getattr(self, name)
            if not values or list(values) != sorted(values) or not (
                    values[0] >= 0 and values[-1] <= TOKENS_MOST):
                raise ValueError(f"{name}: values must ascend, from at least 0 to at most "
                                 f"{TOKENS_MOST}, got {list(values)}")
        return self

    def requests(self, count: int) -> list[Request]:
        """Returns `count` requests: quantile (i + 1/2) / count of each list, for i from 0 on."""
        return [Request(round(_at(self.prompt, at)), max(1, round(_at(self.generated, at))),
                        round(_at(self.tool_s, at) * 1e9))
                for at in ((k + 0.5) / count for k in range(count))]


class ModelFile(SettingsTable):
    """The content of a model file."""

    name: str = Field(min_length=1)
    layers: int = Field(ge=1, le=1 << 24)
    hidden: int = Field(ge=1, le=1 << 24)
    heads: int = Field(ge=1, le=1 << 24)
    kv_heads: int = Field(ge=1, le=1 << 24)
    head_dim: int = Field(0, ge=0, le=1 << 24, description="0: hidden / heads")
    ffn: int = Field(0, ge=0, le=1 << 24)
    vocab: int = Field(ge=1, le=1 << 24)
    tied: bool = False
    experts: int = Field(0, ge=0, le=1 << 24)
    top_k: int = Field(0, ge=0, le=1 << 24)
    expert_ffn: int = Field(0, ge=0, le=1 << 24)
    value_bytes: int = Field(2, ge=1, le=8)
    training: TrainingTable
    rollout: RolloutTable = RolloutTable.model_validate({})
    lengths: LengthsTable | None = None

    @model_validator(mode="after")
    def _fits(self) -> ModelFile:
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_ffn):
            raise ValueError("experts: a mixture needs top_k (1 to experts) and expert_ffn")
        if not self.experts and (self.top_k or self.expert_ffn):
            raise ValueError("top_k, expert_ffn: only a model with experts has them; set `experts`")
        if not self.experts and not self.ffn:
            raise ValueError("ffn: a model without experts needs it")
        if self.shape().params > PARAMS_MOST:
            raise ValueError(f"layers, hidden, ...: the model has more than {PARAMS_MOST} weights")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} must divide heads {self.heads}")
        for name, table in (("training", self.training), ("rollout", self.rollout)):
            wrong = [d for d in table.degrees if d < 1 or d & (d - 1)]
            if wrong or list(table.degrees) != sorted(set(table.degrees)):
                raise ValueError(f"{name}.degrees: must be ascending powers of two, got "
                                 f"{list(table.degrees)}")
        return self

    def shape(self) -> ModelShape:
        """Returns the model's shape in the planner's own type."""
        fields = self.model_dump(exclude={"training", "rollout", "lengths", "head_dim"})
        return ModelShape(head_dim=self.head_dim or self.hidden // self.heads, **fields)

    def job(self) -> Training:
        """Returns the training job in the planner's own type."""
        return Training(**self.training.model_dump())

    def engine(self) -> Rollout:
        """Returns the limits of rollout engines in the planner's own type."""
        return Rollout(**self.rollout.model_dump())


class HardwareFile(SettingsTable):
    """A whole hardware file; each rate is that of one GPU."""

    name: str = Field(min_length=1)
    gpus_per_node: int = Field(8, ge=1, le=1024)
    mem_gib: float = Field(gt=0, description="memory of one GPU in GiB")
    tflops: float = Field(gt=0, description="dense TFLOP/s at the precision of the training")
    mem_gbs: float = Field(gt=0, description="memory bandwidth in GB/s")
    link_gbs: float = Field(gt=0, description="bandwidth to the GPUs of its node in GB/s, one way")
    net_gbs: float = Field(gt=0, description="one GPU's share of the bandwidth to other nodes, "
                                             "GB/s")
    link_latency_us: float = Field(4.0, ge=0)
    net_latency_us: float = Field(15.0, ge=0)
    mfu_train: float = Field(0.45, gt=0, le=1)
    mfu_prefill: float = Field(0.55, gt=0, le=1)
    mem_share: float = Field(0.85, gt=0, le=1)
    comm_share: float = Field(0.80, gt=0, le=1)
    overlap: float = Field(0.80, ge=0, le=1)
    rho: float = Field(0.15, ge=0)
    theta: float = Field(1.0, gt=0)
    step_ms: float = Field(2.0, ge=0, description="fixed duration of a decode step in ms")
    workspace_gib: float = Field(4.0, ge=0)
    sequence_ms: float = Field(0.0, ge=0, description="ms of a decode step per sequence")
    update_s: float = Field(0.0, ge=0, description="fixed duration of an optimizer step in seconds")

    def hardware(self) -> Hardware:
        """Returns the hardware in the planner's own type."""
        return Hardware(
            self.name, self.gpus_per_node, int(self.mem_gib * 2**30), self.tflops * 1e12,
            self.mem_gbs * 1e9, self.link_gbs * 1e9, self.net_gbs * 1e9,
            self.link_latency_us / 1e6, self.net_latency_us / 1e6, self.mfu_train,
            self.mfu_prefill, self.mem_share, self.comm_share, self.overlap, self.rho, self.theta,
            self.step_ms / 1e3, int(self.workspace_gib * 2**30), self.sequence_ms / 1e3,
            self.update_s)


class _Length(BaseModel):
    """A line of a history; fields that are not listed here are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: int = Field(ge=0, le=TOKENS_MOST // 2)
    generated: int = Field(ge=1, le=TOKENS_MOST)
    tool: int = Field(0, ge=0, le=TOKENS_MOST // 2, description="tokens that tools returned")
    tool_s: float = Field(0.0, ge=0, le=1e7)
    turns: int = Field(1, ge=1, le=1 << 16)


class _Measured(BaseModel):
    """A line of measured steps: the time that the plan predicted, and the time that it took."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    stage: str = Field(pattern=r"^(train|rollout)$")
    degree: int = Field(0, ge=0, description="degree of the rollout instance")
    mixed: bool = Field(False, description="whether its plan had instances of other degrees too")
    modelled_s: float = Field(gt=0, le=1e7)
    measured_s: float = Field(gt=0, le=1e7)
    mean_tokens: float = Field(ge=0, le=TOKENS_MOST)

    @model_validator(mode="after")
    def _has_degree(self) -> _Measured:
        if (self.stage == "rollout") != (self.degree > 0):
            raise ValueError("degree: must be at least 1 with stage rollout, and absent with train")
        if self.mixed and self.stage == "train":
            raise ValueError("mixed: only rollouts have it; leave it out with stage train")
        return self


@dataclass(frozen=True)
class Measured:
    """One measured time, and the time that the plan predicted.

    Attributes:
        degree: The rollout degree; 0 for training.
        modelled_ns: The time that the plan predicted, without learned factors.
        measured_ns: The time that the training step or the rollouts took.
        mean_tokens: Mean length of the requests.
        mixed: Whether its plan had instances of other degrees as well.
    """

    degree: int
    modelled_ns: int
    measured_ns: int
    mean_tokens: float
    mixed: bool = False


def read_model(name: str) -> ModelFile:
    """Reads a model file, or a shipped one by name.

    Raises:
        InvalidInput: The file cannot be read or has a wrong field; one line.
    """
    return _read(name, "model", ModelFile)


def read_hardware(name: str) -> HardwareFile:
    """Reads a hardware file, or a shipped one by name; raises as `read_model` does."""
    return _read(name, "hardware", HardwareFile)


def shipped(kind: str) -> list[str]:
    """The names of the shipped model or hardware files."""
    return sorted(p.stem.removeprefix(f"{kind}-") for p in EXAMPLES.glob(f"{kind}-*.toml"))


def read_history(path: Path) -> list[Request]:
    """Reads a history of lengths; raises as `read_model` does.

    A line looks like `{"prompt": 512, "generated": 3000, "tool": 900, "tool_s": 4.5, "turns": 6}`.
    """
    return _lines(path, _Length, lambda one: Request(
        one.prompt + one.tool, one.generated, round(one.tool_s * 1e9), one.turns))


def read_measured(path: Path) -> list[Measured]:
    """Reads measured times, oldest first; raises as `read_model` does."""
    return _lines(path, _Measured, lambda one: Measured(
        one.degree, round(one.modelled_s * 1e9), round(one.measured_s * 1e9), one.mean_tokens,
        one.mixed))


def _read(name: str, kind: str, shape: type[_FileT]) -> _FileT:
    path = Path(name)
    if path.suffix != ".toml" and path.name == name and not path.exists():
        path = EXAMPLES / f"{kind}-{name}.toml"
        if not path.exists():
            raise InvalidInput(f"{kind} {name!r}: there is no such file; shipped are "
                               f"{', '.join(shipped(kind))}")
    try:
        return shape(**read_toml(path, f"{kind} file"))
    except ValidationError as error:
        raise InvalidInput(f"{kind} file {path}: {describe_first_error(error, shape)}") from None


def _lines(path: Path, shape: type[_FileT], made: Callable[[Any], Any]) -> list[Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: {getattr(error, 'strerror', '') or 'not a text file'}"
                           ) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            if not isinstance(told, dict):
                raise InvalidInput(f"{path} line {number}: not a JSON object")
            found.append(made(shape(**told)))
        except ValidationError as error:
            said = describe_first_error(error, shape)
            raise InvalidInput(f"{path} line {number}: {said}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None
    if not found:
        raise InvalidInput(f"{path}: the file holds no line")
    return found


def _at(values: tuple[int, ...] | tuple[float, ...], share: float) -> float:
    """The value at `share` (0 to 1) of the way through equally spaced values, interpolated."""
    place = share * (len(values) - 1)
    low = min(int(place), len(values) - 2) if len(values) > 1 else 0
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
