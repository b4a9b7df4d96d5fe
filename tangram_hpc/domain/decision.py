"""Defines the decisions: orders in the imperative. Pure.

A decision is an order of the scheduler to the driver. Each names the lease, session or allocation
that it is about, so that carrying out the same decision twice does no harm.
"""

from __future__ import annotations

import msgspec

from .allocation import SatelliteShape
from .outcome import Outcome
from .rollouts import Routed
from .service import ServiceSpec
from .session import SessionSpec
from .states import ActionState


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The base class of all decisions."""


class StartLease(Decision, frozen=True):
    """Order `node` to start an action under a lease.

    Attributes:
        node: number of the node.
        lease: number of the lease.
        action: id of the action.
        cores: the CPUs that are lent.
        gpus: the GPUs that are lent.
        restore_ns: expected time to bring the action's service onto `gpus` first; 0 if the service
            is there.
        after: the lease on the same units that must end first; 0 to start at once.
    """

    node: int
    lease: int
    action: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    restore_ns: int = 0
    after: int = 0


class KillLease(Decision, frozen=True):
    """Order `node` to end the attempt under `lease`, and to report its end as `state`."""

    node: int
    lease: int
    state: ActionState
    reason: str


class ResizeLease(Decision, frozen=True):
    """Tell `node` the new CPUs of a running lease."""

    node: int
    lease: int
    cores: tuple[int, ...]


class OpenSession(Decision, frozen=True):
    """Order `node` to build the sandbox of a session."""

    node: int
    spec: SessionSpec


class CloseSession(Decision, frozen=True):
    """Order `node` to remove the sandbox of a session."""

    node: int
    session: int


class PackSession(Decision, frozen=True):
    """Order `node` to remove the sandbox of a session and to archive its files in the job's store.
    """

    node: int
    session: int


class PrepareService(Decision, frozen=True):
    """Tell `node` of a service that it may have to bring to its GPUs."""

    node: int
    spec: ServiceSpec


class AskAllocation(Decision, frozen=True):
    """Submit a satellite of this shape to Slurm."""

    alloc: int
    shape: SatelliteShape


class EndAllocation(Decision, frozen=True):
    """End the workers on these nodes, and with them their job or component.

    `job` is empty if Slurm never named it. A running satellite ends by itself when its worker has
    ended.
    """

    alloc: int
    job: str
    nodes: tuple[int, ...]
    reason: str


class AnnounceSession(Decision, frozen=True):
    """Tell the session's client, and the clients that are attached, that its sandbox is ready on
    `node`."""

    session: int
    node: int


class AnnounceSessionEnd(Decision, frozen=True):
    """Tell the session's client, and the clients that are attached, that the session has ended.

    `reason` is empty if the session's own client closed it. `infeasible` says that the session
    could not have opened on any node. `attached` are the numbers of the attached clients.
    """

    session: int
    reason: str
    infeasible: bool = False
    attached: tuple[int, ...] = ()


class ReplyToClient(Decision, frozen=True):
    """Tell the client the outcome of an action.

    Attributes:
        action: id of the action.
        outcome: how its last attempt ended.
        node: number of the node.
        cores: the CPUs that it held last.
        attempt: number of the last attempt, from 1.
        queue_ns: how long it waited until its last grant, by the broker's clock.
        held_ns: time from that grant to the end, by the broker's clock.
        grants: for each size that the lease had: ns since the grant, and units from then on.
        route: where a turn was routed to; None for other actions.
    """

    action: int
    outcome: Outcome
    node: int
    cores: tuple[int, ...]
    attempt: int
    queue_ns: int
    held_ns: int
    grants: tuple[tuple[int, int], ...] = ()
    route: Routed | None = None

    def ended_as(self, outcome: Outcome) -> ReplyToClient:
        """Returns this reply with another outcome."""
        return msgspec.structs.replace(self, outcome=outcome)

    def by(self, route: Routed) -> ReplyToClient:
        """Returns this reply with the route of the action, which is a turn."""
        return msgspec.structs.replace(self, route=route)
