"""One client of the swarm: the real connection, with its thread, and what its user submits.

Each submission is remembered with its future, so that the laws can be checked against what the user
has seen and not against what the broker believes.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarm.strands import parked
from swarm.wires import Wire
from swarm.world import Process
from tangram_hpc.client.connection import Connection
from tangram_hpc.client.endpoints.grant_request import GrantRequest
from tangram_hpc.client.endpoints.grants import GrantSource
from tangram_hpc.client.future import ExecResult, Future
from tangram_hpc.client.request import Options
from tangram_hpc.client.session_record import SessionRecord
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import TangramError
from tangram_hpc.ports import ChannelLost
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import payload as pl
from tangram_hpc.protocol.frame import Buffer, Envelope
from tangram_hpc.storage.store import FolderStore

if TYPE_CHECKING:
    from swarm.job import Job


class PlayedChannel:
    """A client's connection (`ports.Channel`)."""

    via = "socket"

    def __init__(self, client: ClientProcess, wire: Wire) -> None:
        self._client, self.wire = client, wire
        self._arrived: list[Envelope] = []
        self._lost, self._woken = "", False
        wire.down.receive = lambda message, payload: self._arrived.append((message, payload))
        wire.down.lost = self._lose

    def _lose(self, reason: str) -> None:
        self._lost = reason or "lost"

    def send(self, frame: list[Buffer]) -> None:
        if self._lost and not self._arrived:
            raise ChannelLost(self._lost)
        self.wire.at_peer.carry(frame)

    def wait(self, timeout_s: float, busy: bool) -> Iterable[Envelope]:
        parked(lambda: bool(self._woken or self._arrived or self._lost), timeout_s)
        self._woken = False
        arrived, self._arrived = self._arrived, []
        if not arrived and self._lost:
            raise ChannelLost(self._lost)
        return arrived

    def wake(self) -> None:
        self._woken = True

    def close(self) -> None:
        self.wire.at_peer.close()

    def abandon(self) -> None:
        pass


@dataclass
class Submission:
    """What a user submitted, and what came of it.

    Attributes:
        token: the user's own name of the work, which is in the call and in the result.
        calls: for a grant, how often the user's call was made.
        cancelled: whether the user asked for its cancellation.
        grant_request: for a grant, its request.
        unseen: whether its user's process died before it had ended.
    """

    client: ClientProcess
    kind: Kind
    token: str
    future: Future
    once: str = ""
    session: int = 0
    cancelled: bool = False
    grant_request: GrantRequest | None = None
    calls: int = 0
    calling: bool = False
    unseen: bool = False

    @property
    def id(self) -> int:
        """The number of its action."""
        return self.future.action

    def value(self) -> str:
        """What its user got; empty if it has not ended, or without a value."""
        if not self.future.done() or self.future.cancelled() or self.future.exception():
            return ""
        found = self.future.result()
        return found.stdout.decode() if isinstance(found, ExecResult) else str(found or "")

    def state(self) -> ActionState | None:
        """How the broker said that it ended; None if it never did."""
        return self.future.told[0].outcome.state if self.future.told is not None else None


@dataclass
class OpenedSession:
    """A session that a user opened.

    Attributes:
        released: whether its user has closed it.
    """

    record: SessionRecord
    released: bool = False
    submissions: list[Submission] = field(default_factory=list)


class ClientProcess(Process):
    """A trainer's process.

    Attributes:
        connection: None until the first welcome.
        failed: why it has no connection, or has lost it for good.
        sessions: those that it opened, by number.
        shut_until: its way to brokers is cut off before (world's ns).
        may_lose: whether it has a cause to lose its broker for good.
        missed: how many brokers in a row were gone before they had welcomed it.
    """

    world: Job

    def __init__(self, world: Job, name: str) -> None:
        super().__init__(world, name)
        self.connection: Connection | None = None
        self.failed = ""
        self.wire: Wire | None = None
        self.shut_until, self.may_lose, self.missed = 0, False, 0
        self.submissions: list[Submission] = []
        self.sessions: dict[int, OpenedSession] = {}
        self.grants: GrantSource | None = None
        self.forgets: list[concurrent.futures.Future[Any]] = []
        self.strand(self._connect)

    def _connect(self) -> None:
        try:
            found = Connection([self._dial], "7", lambda where: FolderStore(where), self.name, 0, 1,
                               60.0, "again", 300.0)
        except TangramError as error:
            self.failed = str(error)
        else:
            self.connection, self.grants = found, GrantSource(found)

    def _dial(self) -> PlayedChannel:
        self.wire = self.world.dial(self)
        return PlayedChannel(self, self.wire)

    def broker_gone(self, epoch: int) -> None:
        """A broker is gone. A client that several in a row have not welcomed has been without one
        for the whole time, although each of them was back soon.
        """
        welcome = self.connection.welcome if self.connection is not None else None
        self.missed = 0 if welcome is not None and welcome.epoch == epoch else self.missed + 1
        self.may_lose = self.may_lose or self.missed > 1

    @property
    def number(self) -> int:
        """The number that the broker gave it; 0 before."""
        welcome = self.connection.welcome if self.connection is not None else None
        return welcome.client if welcome is not None else 0

    @property
    def works(self) -> bool:
        """Whether it can submit."""
        if self.connection is not None and self.connection.failure is not None and not self.failed:
            self.failed = str(self.connection.failure)
        return self.running() and self.connection is not None and not self.failed

    def open_ones(self) -> list[Submission]:
        """Its submissions that have not ended."""
        return [one for one in self.submissions if not one.future.done()]

    def die(self) -> None:
        """Ends it at once. Its thread, as it ends, fails the futures, which nobody sees any more.
        """
        for one in self.open_ones():
            one.unseen = True
        super().die()

    # ---- what the user does ----

    def submit(self, kind: Kind, token: str, cpus: Any, retries: int, session: int = 0,
               once: str = "", key: str = "cpu") -> Submission:
        """Submits one action."""
        assert self.connection is not None
        call: pl.Payload = pl.ExecCall(("work", token))
        if kind is Kind.FUNCTION:
            call = pl.FunctionCall("digest", token.encode())
        elif kind is Kind.CALL:
            call = pl.ServiceCall("ask", token.encode())
        record = self.sessions[session].record if session else None
        options = Options(cpus=cpus, retries=retries, once=once, name="work")
        future = self.connection.submit(kind, options, record, "work", call, key=key)
        found = Submission(self, kind, token, future, once, session)
        self._remember(found)
        return found

    def _remember(self, one: Submission) -> None:
        self.submissions.append(one)
        self.world.laws.submitted(one)
        if one.session:
            self.sessions[one.session].submissions.append(one)

    def ask_grant(self, token: str) -> None:
        """Asks for a slot of the endpoint."""
        assert self.grants is not None
        grant_request = self.grants.request("e", "")
        self._remember(Submission(self, Kind.GRANT, token, grant_request.future,
                                  grant_request=grant_request))

    def take_grant(self, one: Submission) -> None:
        """Takes a grant that has arrived, and begins the call."""
        assert one.grant_request is not None
        if one.grant_request._taken(one.grant_request._next.result()) is not None:
            one.calls += 1
            one.calling = True
            self.world.laws.called(one)

    def end_grant(self, one: Submission, state: ActionState) -> None:
        """Ends the call of a grant."""
        assert one.grant_request is not None
        one.calling = False
        one.grant_request.end(state)

    def granted(self) -> list[Submission]:
        """Requests whose grant has arrived and is not taken."""
        return [one for one in self.open_ones() if one.grant_request is not None and not one.calling
                and not one.calls and one.grant_request._next.done()
                and one.grant_request._next.exception() is None]

    def open_session(self, spec: SessionSpec) -> None:
        """Requests a session."""
        assert self.connection is not None
        record = self.connection.open_session(spec, {}, "")
        self.sessions[record.spec.id] = OpenedSession(record)

    def release(self, session: int) -> None:
        """Closes a session."""
        assert self.connection is not None
        self.sessions[session].released = True
        self.connection.send_of_session(session, ms.ReleaseSession(session))

    def cancel(self, one: Submission) -> None:
        """Asks for the end of an action."""
        one.cancelled = True
        one.future.cancel()

    def forget(self, names: tuple[str, ...]) -> None:
        """Forgets kept results."""
        assert self.connection is not None
        _, answer = self.connection.begin(lambda request: ms.Forget(request, names))
        self.forgets.append(answer)

    def close(self) -> None:
        """Says goodbye."""
        assert self.connection is not None
        self.connection.close()
