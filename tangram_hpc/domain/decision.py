"""Pure. Decisions: orders in the imperative; the scheduler's only output besides planned events.

Law: frozen; performing one twice is harmless (each names the lease or session it is about).
"""

from __future__ import annotations

from typing import Union

import msgspec

from .allocation import SatelliteShape
from .outcome import Outcome
from .rollouts import Routed
from .service import ServiceSpec
from .session import SessionSpec
from .states import ActionState


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The common head of all decisions."""


class StartLease(Decision, frozen=True):
    """Tell `node` to start `action` under `lease` on these units, after bringing its service onto
    the GPUs where that costs `restore_ns`, and when the lease `after` is gone (0: now)."""

    node: int
    lease: int
    action: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    restore_ns: int = 0
    after: int = 0


class KillLease(Decision, frozen=True):
    """Tell `node` to end what runs under `lease`; it will report `state`."""

    node: int
    lease: int
    state: ActionState
    reason: str


class ResizeLease(Decision, frozen=True):
    """Tell `node` the new units of a running lease."""

    node: int
    lease: int
    cores: tuple[int, ...]


class OpenSession(Decision, frozen=True):
    """Tell `node` to build a session's sandbox."""

    node: int
    spec: SessionSpec


class CloseSession(Decision, frozen=True):
    """Tell `node` to take a session's sandbox down."""

    node: int
    session: int


class PackSession(Decision, frozen=True):
    """Tell `node` to take a session's sandbox down and to put its files into the store."""

    node: int
    session: int


class PrepareService(Decision, frozen=True):
    """Tell `node` of a service that it may be asked to bring to its GPUs."""

    node: int
    spec: ServiceSpec


class AskAllocation(Decision, frozen=True):
    """Submit a satellite of this shape."""

    alloc: int
    shape: SatelliteShape


class EndAllocation(Decision, frozen=True):
    """End the workers on these nodes, and with them the job or component (empty: Slurm never said
    which). A satellite that runs ends by itself when its worker has."""

    alloc: int
    job: str
    nodes: tuple[int, ...]
    reason: str


class AnnounceSession(Decision, frozen=True):
    """Tell the client that its session stands on `node`."""

    session: int
    node: int


class AnnounceSessionEnd(Decision, frozen=True):
    """Tell the client that its session is gone; `reason` is empty for an orderly end. `never`: it
    could not have opened anywhere."""

    session: int
    reason: str
    never: bool = False


class Reply(Decision, frozen=True):
    """Tell the client an action's outcome. Times are the broker's: queued until the last grant,
    held from that grant to the finish (both in ns). `grants`: (ns since that grant, units from
    then on) of each size it had. `route`: of a turn, where it went."""

    action: int
    outcome: Outcome
    node: int
    cores: tuple[int, ...]
    attempt: int
    queue_ns: int
    held_ns: int
    grants: tuple[tuple[int, int], ...] = ()
    route: Routed | None = None

    def by(self, route: Routed | None) -> Reply:
        """The same of a turn that went there."""
        return self if route is None else msgspec.structs.replace(self, route=route)


AnyDecision = Union[  # noqa: UP007
    StartLease,
    KillLease,
    ResizeLease,
    OpenSession,
    CloseSession,
    PrepareService,
    AskAllocation,
    EndAllocation,
    AnnounceSession,
    AnnounceSessionEnd,
    Reply,
]
