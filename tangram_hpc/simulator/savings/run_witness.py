"""Collects from a job's events what the records of its actions do not say: when nodes, services,
endpoints, sessions and clients were there; and groups the actions of one trajectory.

The witness takes each event once, in order, beside the fold of the records. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...accounting.record import ActionRecord
from ...domain import event as ev
from ...domain.ids import client_of
from ...domain.node import NodeSpec
from ...domain.service import EndpointSpec, ServiceSpec
from ...domain.session import SessionSpec


@dataclass
class NodeStay:
    """Says when a node was there.

    Attributes:
        spec: The node.
        since_ns: When it joined, ns since the epoch.
        until_ns: When it was lost; 0 while it is there.
    """

    spec: NodeSpec
    since_ns: int
    until_ns: int = 0

    def held_ns(self, since_ns: int, until_ns: int) -> int:
        """Returns how long of this time it was there."""
        end = min(self.until_ns or until_ns, until_ns)
        return max(0, end - max(self.since_ns, since_ns))


@dataclass
class SessionStay:
    """Says when a session was there. Times are in ns since the epoch, 0 for what has not happened.

    Attributes:
        spec: The specification that its client requested.
        asked_ns: When it was requested.
        ready_ns: When its sandbox was ready for the first time.
        closed_ns: When it was closed.
        by_client: Whether its own client closed it.
    """

    spec: SessionSpec
    asked_ns: int
    ready_ns: int = 0
    closed_ns: int = 0
    by_client: bool = False


_WITNESSED = frozenset({
    ev.ClientJoined, ev.NodeJoined, ev.NodeLost, ev.ServiceDeclared, ev.EndpointDeclared,
    ev.SessionRequested, ev.SessionReady, ev.SessionClosed})


@dataclass
class RunWitness:
    """Records what was there while the job ran.

    Attributes:
        stays: Each stay of each node, by the number that the broker gave it.
        services, endpoints: What was declared, by name.
        sessions: All sessions, by id.
        joined_ns: When each client first connected, by its number.
    """

    stays: dict[int, NodeStay] = field(default_factory=dict)
    services: dict[str, ServiceSpec] = field(default_factory=dict)
    endpoints: dict[str, EndpointSpec] = field(default_factory=dict)
    sessions: dict[int, SessionStay] = field(default_factory=dict)
    joined_ns: dict[int, int] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[str, NodeSpec]:
        """Returns all nodes that were ever there, by name."""
        return {stay.spec.name: stay.spec for stay in self.stays.values()}

    def add(self, event: ev.Event) -> None:
        """Takes one event."""
        if type(event) not in _WITNESSED:
            return  # one set look-up for the many events of actions, instead of a test of each type
        match event:
            case ev.ClientJoined(client=client):
                self.joined_ns.setdefault(client, event.at)
            case ev.NodeJoined(node=node, spec=spec):
                self.stays[node] = NodeStay(spec, event.at)
            case ev.NodeLost(node=node) if node in self.stays:
                self.stays[node].until_ns = event.at
            case ev.ServiceDeclared(spec=spec):
                self.services[spec.name] = spec
            case ev.EndpointDeclared(spec=spec):
                self.endpoints[spec.name] = spec
            case ev.SessionRequested(spec=spec):
                self.sessions[spec.id] = SessionStay(spec, event.at)
            case ev.SessionReady(session=session) if session in self.sessions:
                stay = self.sessions[session]
                stay.ready_ns = stay.ready_ns or event.at
            case ev.SessionClosed(session=session) if session in self.sessions:
                stay = self.sessions[session]
                stay.closed_ns, stay.by_client = event.at, not event.reason


def group_by_trajectory(records: Iterable[ActionRecord], witness: RunWitness
                        ) -> list[list[ActionRecord]]:
    """Groups the actions of one session or of one named trajectory, in the order of submission.

    A session belongs to a trajectory if its name is the trajectory's, or if one of its actions
    says so. An action with neither is a trajectory of its own.
    """
    above: dict[object, object] = {}

    def find(key: object) -> object:
        while (parent := above.setdefault(key, key)) != key:
            above[key] = above[parent]  # the path is halved
            key = parent
        return key

    keys = []
    for r in records:
        stay = witness.sessions.get(r.action.session)
        names = (r.action.trajectory_name, stay.spec.name if stay is not None else "")
        mine: list[object] = [r.action.session] if r.action.session else []
        mine += [(client_of(r.action.id), name) for name in names if name]
        mine = mine or [("alone", r.action.id)]
        for other in mine[1:]:
            above[find(other)] = find(mine[0])
        keys.append((mine[0], r))
    groups: dict[object, list[ActionRecord]] = {}
    for key, r in keys:
        groups.setdefault(find(key), []).append(r)
    return list(groups.values())

