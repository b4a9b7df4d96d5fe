"""A client of the model: it submits all that a client may, and comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatter.job import ENDPOINTS, JOB, POOLS, SERVICES, S
from chatter.snapshots import Environments
from chatter.worker import Link, value_of
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import client_of, mint
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import Turn
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.session_token import attach_token, hash_of
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms

if TYPE_CHECKING:
    from chatter.job import ChatterJob

_QUERIES = ("info", "nodes", "pending", "services", "rollouts", "sessions", "tenants", "queue",
            "top", "explain")
NO_SNAPSHOT = f"snap-{'f' * 24}"
SECRET = "secret"


class Client:
    """A client and what it knows.

    Attributes:
        open: its actions without a result.
        ended: its actions whose results it has not acknowledged.
        sessions: the sessions that it may use, its own and others.
        grants: the lease of each of its grants.
        gone: whether it has said goodbye, or has lost its broker for good.
    """

    def __init__(self, job: ChatterJob, name: str) -> None:
        self.job, self.uid, self.name = job, f"{name}.{job.rng.random()}", name
        self.tenant = job.rng.choice(("", "a", "b")) if job.tenants else ""
        self.number, self.counter, self.gone = 0, 0, False
        self.open: dict[int, Action] = {}
        self.ended: dict[int, None] = {}
        self.sessions: dict[int, SessionSpec] = {}
        self.grants: dict[int, int] = {}
        self.environments = Environments(self)
        self.link: Link | None = None
        self.join()

    # ---- its connection ----

    def join(self) -> None:
        """Connects, for the first time or again."""
        old, self.link = self.link, Link(self.job)
        self.link.say(ms.ClientHello(ms.PROTOCOL_VERSION, JOB, self.uid, self.name,
                                     tenant=self.tenant))
        if old is not None and not old.closed:  # the broker learns late that it is dead
            old.leave()
            old.closed = True
        self.hear()

    @property
    def connected(self) -> bool:
        """Whether it can say something."""
        return self.link is not None and not self.link.closed and self.number > 0

    def leave(self, bye: bool) -> None:
        """Ends the connection, in order or not."""
        if self.link is not None and not self.link.closed:
            if bye:
                self.link.say(ms.Bye())
            self.link.leave()
            self.link.closed = True
        self.gone = self.gone or bye

    def say(self, message: Any, payload: bytes | None = None) -> None:
        """Says something, if it is connected."""
        if self.connected and self.link is not None:
            self.link.say(message, payload)

    def hear(self) -> None:
        """Reads all that has arrived."""
        if self.link is None:
            return
        for message, payload in self.link.unread():
            self._hear(message, payload)

    def _hear(self, message: Any, payload: bytes | None) -> None:
        match message:
            case ms.Welcome(client=number, fresh=fresh):
                again = self.number == number and not fresh
                if fresh and self.number:
                    self.gone = True
                self.number = self.number or number
                if again:
                    self._catch_up()
            case ms.ActionResult(action=action):
                if (asked := self.open.pop(action, None)) is not None:
                    self.ended[action] = None
                    self._check(asked, message, payload)
                self.grants.pop(action, None)
            case ms.Rejected(id=number):
                self.open.pop(number, None)
                self.sessions.pop(number, None)
            case ms.SessionDown(session=session):
                self.sessions.pop(session, None)
            case ms.Granted(action=action, lease=lease):
                if action in self.open:
                    self.grants[action] = lease
            case ms.Attached(spec=spec):
                self.sessions[spec.id] = spec
            case ms.QueryReply():
                self.environments.hear(message, payload)
            case ms.PeerRefused() | ms.Shutdown():
                self.gone = True

    @staticmethod
    def _check(asked: Action, result: ms.ActionResult, payload: bytes | None) -> None:
        """Checks that an action's result is its own."""
        if result.outcome.state is ActionState.COMPLETED and asked.kind is not Kind.GRANT:
            assert payload == value_of(asked), f"{payload!r} is the result of {asked}"

    def _catch_up(self) -> None:
        """Sends again what may have been lost."""
        self.environments.ask_again()
        for session, spec in list(self.sessions.items()):
            if client_of(session) == self.number:
                self.say(ms.RequestSession(spec, True))
            elif spec.shared:
                self._attach(spec, session)
        for action in list(self.open.values()):
            self.say(ms.Submit(action), b"call")

    # ---- what its user does ----

    def act(self) -> None:
        """One thing that its user does."""
        self.hear() if self.job.rng.random() < 0.5 else None
        of = (self.submit, self._open_session, self._cancel, self._acknowledge, self._of_session,
              self._end_grant, self._of_trajectory, self._ask, self.environments.act,
              self._attach_to_any)
        self.job.rng.choices(of, self.job.weights)[0]()

    def _cancel(self) -> None:
        if self.open:
            self.say(ms.Cancel((self.job.rng.choice(list(self.open)),)))

    def _acknowledge(self) -> None:
        if self.ended:
            self.acknowledge(self.job.rng.choice((1, 100)))

    def _end_grant(self) -> None:
        if self.grants:
            self.end_grant(self.job.rng.choice(list(self.grants)))

    def _id(self) -> int:
        self.counter += 1
        return mint(self.number, self.counter)

    def submit(self) -> None:
        """Submits an action of any kind."""
        rng = self.job.rng
        if len(self.open) >= 30:
            return
        draw = rng.choice(self.job.kinds)
        fields: dict[str, Any] = {"attempts_max": rng.choice((1, 1, 2, 3)),
                                  "timeout_ns": rng.choice((0, 0, S))}
        if draw == "turn":
            turn = Turn("p", f"j{rng.randrange(5)}", rng.randrange(3), rng.randrange(5000),
                        rng.randrange(200))
            fields |= {"kind": Kind.CALL, "key": "rollouts:p", "turn": turn}
        elif draw == "call":
            name, degrees = rng.choice((("s", (1,)), ("s", (1,)), ("t", (1, 2)), ("t", (2,)),
                                        ("u", (2, 4)), ("u", (4,))))
            fields |= {"kind": Kind.CALL, "key": f"service:{name}", "degrees": degrees}
        elif draw in ("grant", "endpoint"):
            fields |= {"kind": Kind.GRANT if draw == "grant" else Kind.FUNCTION,
                       "key": f"endpoint:{rng.choice('ef')}"}
        else:
            fields |= self._of_cpus(rng)
        if rng.random() < 0.2 and fields.get("kind") not in (Kind.GRANT, Kind.FILE):
            fields["once"] = f"{fields.get('kind')}{fields.get('key')}{rng.randrange(8)}"
        if rng.random() < 0.2:
            fields["profile"] = Profile(rng.choice((S // 1000, S)), rng.choice((0, 200_000)))
        action = Action(self._id(), f"x{rng.randrange(3)}", **fields)
        self.open[action.id] = action
        self.say(ms.Submit(action), b"call")

    def _of_cpus(self, rng: Any) -> dict[str, Any]:
        kind = rng.choice((Kind.EXEC, Kind.EXEC, Kind.FUNCTION))
        fields: dict[str, Any] = {
            "degrees": rng.choice(((1,), (1,), (1,), (2,), (1, 2, 4), (4,), (2, 3))),
            "mem_mib": rng.choice((0, 0, 0, 100)), "resizable": rng.random() < 0.8,
            "component": rng.choice(("", "", "", "big")), "trusted": rng.random() < 0.3}
        if self.sessions and rng.random() < 0.6:
            fields |= {"session": rng.choice(list(self.sessions)), "component": "", "mem_mib": 0}
            if rng.random() < 0.2:
                kind, fields["degrees"] = Kind.FILE, (0,)
        elif rng.random() < 0.1:
            kind, fields["gpus"], fields["trusted"] = Kind.FUNCTION, 1, True
        return fields | {"kind": kind}

    def _open_session(self) -> None:
        rng = self.job.rng
        if len(self.sessions) >= 5:
            return
        number, background = self._id(), rng.choice(("stop", "share", "end", "run", "run"))
        fields: dict[str, Any] = {
            "mem_mib": rng.choice((10, 10, 400)), "parallel": rng.random() < 0.3,
            "background": background, "movable": rng.random() < 0.5,
            "idle_ns": rng.choice((0, 0, S)), "ttl_ns": rng.choice((0, 0, 0, 8 * S)),
            "grace_ns": rng.choice((-1, -1, 0, 2 * S)), "component": rng.choice(("", "", "big")),
            "background_cpus": rng.choice(((1,), (1, 2))) if background == "run" else (1,)}
        if rng.random() < 0.3:
            secret = f"{SECRET}{number}"
            fields |= {"name": f"n{number}", "attach_hash": hash_of(attach_token(secret)),
                       "close_hash": hash_of(secret), "outlives": rng.random() < 0.4}
        elif rng.random() < self.job.snapshot_rate:
            fields |= {"snapshot": rng.choice((*self.job.snapshots[-3:], NO_SNAPSHOT))}
        elif self.sessions and rng.random() < 0.3:
            fields |= {"origin": rng.choice(list(self.sessions)), "component": ""}
        spec = SessionSpec(number, **{"name": "", **fields})
        self.sessions[number] = spec
        self.say(ms.RequestSession(spec))

    def _of_session(self) -> None:
        if not self.sessions:
            return
        session, chance = self.job.rng.choice(list(self.sessions)), self.job.rng.random()
        if chance < 0.4:
            self.say(ms.ReleaseSession(session))
        elif chance < 0.7:
            self.say(ms.RenewSession(session))
        elif client_of(session) != self.number:
            self.sessions.pop(session)
            self.say(ms.DetachSession(session))

    def _attach_to_any(self) -> None:
        shared = [s.spec for s in self.job.ledger.sessions.values()
                  if s.spec.shared and client_of(s.spec.id) != self.number]
        if shared:
            self._attach(self.job.rng.choice(shared), 0)

    def _attach(self, spec: SessionSpec, session: int) -> None:
        rng, secret = self.job.rng, f"{SECRET}{spec.id}"
        closes = rng.random() < 0.5
        self.say(ms.AttachSession(1, spec.name, secret if closes else attach_token(secret),
                                  closes and rng.random() < 0.5, session))

    def end_grant(self, action: int) -> None:
        """Ends, or gives up, a call of an endpoint."""
        rng, lease = self.job.rng, self.grants.pop(action)
        state = rng.choice((ActionState.COMPLETED, ActionState.COMPLETED, ActionState.FAILED))
        pushed = rng.choice((0, 1, 2)) if state is ActionState.FAILED else 0
        lease = rng.choice((lease, lease, lease, 0))
        self.say(ms.GrantEnded(action, lease, Outcome(
            state, exec_ns=1000, pushed=pushed, retry_after_ns=rng.choice((0, S)))))

    def acknowledge(self, most: int) -> None:
        """Acknowledges results."""
        found = tuple(list(self.ended)[:most])
        for action in found:
            del self.ended[action]
        self.say(ms.Ack(found))

    def _of_trajectory(self) -> None:
        rng, trajectory = self.job.rng, f"j{self.job.rng.randrange(5)}"
        if rng.random() < 0.6:
            self.say(ms.ReportToolReturn("p", trajectory, "tool", rng.randrange(9000),
                                         rng.randrange(3)))
        else:
            self.say(ms.EndTrajectory("p", trajectory, rng.choice((-1, 10, 500)),
                                      rng.choice((-1, 0, 1))))

    def _ask(self) -> None:
        rng = self.job.rng
        what = rng.choice(_QUERIES)
        about = [*self.open, *self.sessions, *self.ended]
        one = rng.choice(about) if about else 1
        argument = rng.choice(("", f"{client_of(one)}.{one & 0xFFFFFFFF}"))
        if what == "explain" and not argument:
            argument = "allocation"
        self.say(ms.Query(1, what, argument))
        stream = mint(self.number, 1 + rng.randrange(4))
        message = rng.choice((
            ms.Forget(2, (), rng.choice(("", "Kind"))), ms.OpenStream(stream, one, 80),
            ms.StreamData(stream), ms.StreamEnded(stream), ms.StreamCredit(stream, 5),
            ms.Input(one, 0, n=1), ms.Input(one, 1), ms.Input(one, 2, 15), ms.Ping(),
            ms.ManageSnapshot(3, rng.choice(("list", "remove")),
                              rng.choice((*self.job.snapshots[-3:], NO_SNAPSHOT))),
            ms.DeclareService(4, rng.choice(SERVICES)), ms.DeclareRollouts(4, rng.choice(POOLS)),
            ms.DeclareEndpoint(4, rng.choice(ENDPOINTS))))
        self.say(message, b"x" if getattr(message, "n", 0) else None)

    def come_to_the_end(self, close: bool) -> None:
        """Uses its grants, acknowledges, and closes its sessions if that is wanted."""
        self.hear()
        while self.environments.builds:
            self.environments.build(self.environments.builds.pop())
        for action in list(self.grants):
            self.say(ms.GrantEnded(action, self.grants.pop(action),
                                   Outcome(ActionState.COMPLETED, exec_ns=1)))
        self.acknowledge(1000)
        used = {action.session for action in self.open.values()}
        for session in list(self.sessions):
            if close or session not in used:
                self.say(ms.ReleaseSession(session))
                if client_of(session) != self.number:
                    self.sessions.pop(session)
