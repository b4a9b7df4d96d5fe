"""What a broker is told at its start, and what it knows of each of its conversations."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..domain.allocation import AllocPolicy
from ..domain.rollouts import RolloutsSpec
from ..domain.service import EndpointSpec, ServiceSpec
from ..ports import Link
from .outgoing import Queue


@dataclass(frozen=True)
class Settings:
    """What a broker is told at its start. `nodes` is how many workers are expected; `gap_s` passes
    between two beats of a busy broker, so that they are few and large."""

    job: str
    store: str
    nodes: int = 1
    grace_s: float = 30.0
    join_s: float = 120.0
    kill_wait_s: float = 2.0
    output_max: int = 1 << 20
    user: str = ""
    version: str = ""
    services: tuple[ServiceSpec, ...] = ()
    endpoints: tuple[EndpointSpec, ...] = ()
    rollouts: tuple[RolloutsSpec, ...] = ()
    gap_s: float = 0.0
    policy: AllocPolicy | None = None
    slurm_query_s: float = 30.0


@dataclass(slots=True)
class Talk:
    """One conversation: the link, and who it turned out to be."""

    link: Link
    client: int = 0
    node: int = 0
    leaving: str = ""  # why its worker will be gone soon
    said_bye: bool = False
    queue: Queue = field(default_factory=Queue)  # of words that wait for room on the link
