"""Reads the simulator's inputs: workloads in `tangram-workload/1`, and cluster files.

Every error is one line that names the file, the place in it and what is wrong. Only the format's
own defaults are used. Times become whole nanoseconds here, rounded once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config.first_error import describe_first_error
from ..config.tenants import Tenant
from ..domain.node import NodeSpec
from ..domain.service import MICRO, EndpointSpec, ServiceSpec, endpoint_of, service_of
from ..domain.tenant import DEFAULT_TENANT
from ..errors import InvalidInput
from ..scheduler.state.gpu_blocks import GpuSet

FORMAT = "tangram-workload/1"
EXAMPLES = Path(__file__).resolve().parent / "examples"
_SECOND = 10**9
UNITS_MAX = 10**7  # CPUs and GPUs of one kind of node; each is kept by its number
_Seconds = Annotated[float, Field(ge=0, le=10**12)]  # far beyond any run
_RATE_MAX = 10**9  # calls per second of an endpoint
_Degree = Annotated[int, Field(le=1 << 16)]  # the bound of a client's action, too


def to_ns(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * _SECOND)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class WorkAction(_Model):
    """One action of a turn. `work_s` is its run time on one unit."""

    name: str
    resource: str = Field(pattern=r"^(cpu|service:.+|endpoint:.+)$")
    work_s: _Seconds
    degrees: tuple[_Degree, ...] = Field(min_length=1)
    serial: float = Field(0.0, ge=0, le=1)
    mem_mib: int = Field(0, ge=0)
    resize: bool = True

    def run_ns(self, units: int) -> int:
        """Run time on `units` units, in ns (Amdahl's law with the serial fraction `serial`)."""
        return to_ns(self.work_s * (self.serial + (1.0 - self.serial) / units))


class WorkloadTurn(_Model):
    """The policy takes `think_s` seconds; then all actions become ready at once."""

    think_s: _Seconds
    actions: tuple[WorkAction, ...]


class SessionNeed(_Model):
    """The memory that a trajectory's session holds."""

    mem_mib: int = Field(0, ge=0)


class WorkloadTrajectory(_Model):
    """One trajectory of a step; `tenant` names the tenant for which it counts."""

    trajectory: str
    tenant: str = DEFAULT_TENANT
    start_s: _Seconds
    session: SessionNeed = SessionNeed(mem_mib=0)
    turns: tuple[WorkloadTurn, ...]


class Workload(_Model):
    """A whole workload file."""

    name: str
    trajectories: tuple[WorkloadTrajectory, ...]


class ClusterNode(_Model):
    """`count` equal nodes. An action that is resized there makes no progress for `resize_s`."""

    name: str
    count: int = Field(1, ge=1)
    cpus: int = Field(ge=0)
    mem_mib: int = Field(ge=0)
    gpus: int = Field(0, ge=0)
    sockets: int = Field(1, ge=1)
    resize_s: _Seconds = 0.0

    @model_validator(mode="after")
    def _can_be_listed(self) -> ClusterNode:
        if self.count * (self.cpus + self.gpus) > UNITS_MAX:
            raise ValueError(f"count: more than {UNITS_MAX} CPUs and GPUs cannot be simulated")
        return self


class ClusterService(_Model):
    """A GPU service of the cluster.

    Attributes:
        name: The NAME in `service:NAME`.
        restore_s: Time to bring it onto its GPUs.
        weights_mib: Host memory that its weights take while it is parked.
        node: Name of the only node on which it can be; empty for any.
        gpus: The only block of that node on which it can be; empty for any.
    """

    name: str
    restore_s: _Seconds = 0.0
    weights_mib: int = Field(0, ge=0)
    node: str = ""
    gpus: tuple[int, ...] = ()


class ClusterEndpoint(_Model):
    """An external endpoint and its quota; by default its bucket holds the tokens of one second."""

    name: str
    concurrency: int = Field(ge=1)
    rate_per_s: float | None = Field(None, ge=1 / MICRO, le=_RATE_MAX)
    burst: float | None = Field(None, ge=1, le=_RATE_MAX)


class Cluster(_Model):
    """A whole cluster file."""

    nodes: tuple[ClusterNode, ...] = Field(min_length=1)
    services: tuple[ClusterService, ...] = ()
    endpoints: tuple[ClusterEndpoint, ...] = ()
    tenants: dict[str, Tenant] = {}

    def node_specs(self, allocation: str = "") -> list[NodeSpec]:
        """All nodes with their full names, in order, as nodes of one allocation."""
        return [NodeSpec(name, name, tuple(range(n.cpus)), n.mem_mib, tuple(range(n.gpus)),
                         backends=("model",), untrusted=("model",), allocation=allocation)
                for name, n in self._named()]

    def _named(self) -> list[tuple[str, ClusterNode]]:
        return [(n.name if n.count == 1 else f"{n.name}{i}", n)
                for n in self.nodes for i in range(n.count)]

    def resize_ns(self) -> dict[str, int]:
        """Returns how long a resize takes on each node, by the node's full name, in ns."""
        return {name: to_ns(n.resize_s) for name, n in self._named()}

    def service_specs(self, work: Workload) -> list[ServiceSpec]:
        """Each service, with the number of calls that this workload makes of it."""
        calls: dict[str, int] = {}
        for action in all_actions(work):
            name = service_of(action.resource)
            calls[name] = calls.get(name, 0) + 1
        return [ServiceSpec(s.name, to_ns(s.restore_s), s.weights_mib, calls.get(s.name, 0),
                            node=s.node, gpus=s.gpus)
                for s in self.services]

    def endpoint_specs(self) -> list[EndpointSpec]:
        """Returns the specification of each endpoint of the cluster."""
        return [_endpoint(e) for e in self.endpoints]


def _endpoint(e: ClusterEndpoint) -> EndpointSpec:
    burst = e.burst if e.burst is not None else max(1.0, e.rate_per_s or 1.0)
    return EndpointSpec(e.name, e.concurrency, _micro(e.rate_per_s or 0), _micro(burst))


def _micro(amount: float) -> int:
    """Converts to whole millionths, rounded down."""
    return int(Fraction(str(amount)) * MICRO)


def together(works: Sequence[tuple[str, Workload, float]]) -> Workload:
    """Returns several workloads as one, each for a tenant of its own.

    Args:
        works: for each workload its tenant, the workload, and by how many seconds it begins later
            than it says.
    """
    found = [one.model_copy(update={"trajectory": f"{tenant}/{one.trajectory}", "tenant": tenant,
                                    "start_s": one.start_s + later_s})
             for tenant, work, later_s in works for one in work.trajectories]
    return Workload(name="+".join(work.name for _, work, _ in works), trajectories=tuple(found))


def all_actions(work: Workload) -> list[WorkAction]:
    """Every action of a workload, in order."""
    return [a for t in work.trajectories for turn in t.turns for a in turn.actions]


def example(path: Path, kind: str) -> Path:
    """The shipped file of this name, if the name has no suffix and no such file is here.

    The name `coding-200` stands for a workload and for its cluster; `kind` is the suffix, `.jsonl`
    or `.json`.

    Raises:
        InvalidInput: There is no such file and no such example.
    """
    if path.suffix or path.exists() or path.name != str(path):
        return path
    for name in (path.name, f"cluster-{path.name}"):
        if (EXAMPLES / f"{name}{kind}").is_file():
            return EXAMPLES / f"{name}{kind}"
    there = ", ".join(sorted(p.stem.removeprefix("cluster-") for p in EXAMPLES.glob(f"*{kind}")))
    raise InvalidInput(f"{path}: there is no such file, and no such example; the examples are "
                       f"{there}")


def read_workload(path: Path) -> Workload:
    """Reads a workload file, or a shipped one by its name without a suffix.

    Raises:
        InvalidInput: The file cannot be read or breaks the format; one line.
    """
    path = example(path, ".jsonl")
    lines = [(number, text) for number, text in enumerate(_text(path).split("\n"), 1)
             if text.strip()]
    head = _json(lines[0][1], f"{path} line {lines[0][0]}") if lines else None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise InvalidInput(f"workload {path}: its first line must say "
                           f'{{"format": "{FORMAT}", ...}}')
    found: dict[str, WorkloadTrajectory] = {}
    for number, text in lines[1:]:
        where = f"workload {path} line {number}"
        try:
            one = WorkloadTrajectory.model_validate_json(text)
        except ValidationError as error:
            said = describe_first_error(error, WorkloadTrajectory)
            raise InvalidInput(f"{where}: {said}") from None
        if one.trajectory in found:
            raise InvalidInput(f"{where}: trajectory {one.trajectory!r} is there twice")
        _check_degrees(one, where)
        found[one.trajectory] = one
    return Workload(name=str(head.get("name", path.stem)), trajectories=tuple(found.values()))


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster file, or a shipped one by its name without a suffix.

    Raises:
        InvalidInput: The file cannot be read or is no cluster; one line.
    """
    path = example(path, ".json")
    try:
        cluster = Cluster.model_validate_json(_text(path))
    except ValidationError as error:
        raise InvalidInput(f"cluster {path}: {describe_first_error(error, Cluster)}") from None
    for what, names in (("node", [n.name for n in cluster.node_specs()]),
                        ("service", [s.name for s in cluster.services]),
                        ("endpoint", [e.name for e in cluster.endpoints])):
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise InvalidInput(f"cluster {path}: {what} {twice!r} is there twice")
    return cluster


def check_match(work: Workload, cluster: Cluster) -> None:
    """Checks that the cluster has everything that the workload names.

    Raises:
        InvalidInput: It has not; the line names what is missing.
    """
    services = {s.name for s in cluster.services}
    endpoints = {e.name for e in cluster.endpoints}
    blocks = {size for n in cluster.node_specs()
              for size, found in GpuSet(n.gpus).blocks.items() if found}
    for action in all_actions(work):
        service, endpoint = service_of(action.resource), endpoint_of(action.resource)
        if service and service not in services:
            raise InvalidInput(f"workload {work.name}: the cluster has no service {service!r}")
        if service and action.degrees[0] not in blocks:
            raise InvalidInput(f"workload {work.name}: {action.name} needs a block of "
                               f"{action.degrees[0]} GPUs and no node of the cluster has one")
        if endpoint and endpoint not in endpoints:
            raise InvalidInput(f"workload {work.name}: the cluster has no endpoint {endpoint!r}")


def _check_degrees(one: WorkloadTrajectory, where: str) -> None:
    for i, turn in enumerate(one.turns):
        for k, action in enumerate(turn.actions):
            degrees = list(action.degrees)
            if degrees[0] < 1 or degrees != sorted(set(degrees)):
                raise InvalidInput(f"{where}: turns.{i}.actions.{k}.degrees: {degrees} must be "
                                   "ascending whole numbers from 1")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: not a text file") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: {error}") from None

