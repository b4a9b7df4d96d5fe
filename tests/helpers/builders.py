"""Builders for tests of the core: a scheduler fed by hand, without any driver or clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler


@dataclass
class World:
    """A scheduler, all events it was given, all decisions it made; time is a counter."""

    placer: str = "first-fit"
    now: int = 0
    events: list[ev.Event] = field(default_factory=list)
    decisions: list[de.Decision] = field(default_factory=list)
    counter: int = 0
    client: int = 1  # whose ids are minted

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(make_placer(self.placer))
        self.happen(ev.ClientJoined(0, 1, "uid-1", "test", 0, 1, "socket"))

    @property
    def ledger(self):
        return self.scheduler.ledger

    def happen(self, fact: ev.Event) -> list[de.Decision]:
        made = []
        for event in self.scheduler.consequences(fact):
            self.events.append(event)
            made += self.scheduler.handle(event)
            self.ledger.check()
        self.decisions += made
        return made

    def plan(self) -> list[de.Decision]:
        made = []
        self.now += 1
        while events := self.scheduler.plan(self.now):
            for event in events:
                made += self.happen(event)
        return made

    def node(self, cpus: int = 4, mem: int = 1024, gpus: int = 0, component: str = "",
             complete: bool = True, backends: tuple[str, ...] = ("model",),
             untrusted: tuple[str, ...] = ("model",), ahead: int = 0) -> int:
        number = self.ledger.next_node
        spec = NodeSpec(f"n{number}", "host", tuple(range(cpus)), mem, tuple(range(gpus)),
                        component, backends=backends, untrusted=untrusted, ahead=ahead)
        self.happen(ev.NodeJoined(self.now, number, spec))
        if complete:
            self.happen(ev.NodesComplete(self.now, number))
        return number

    def id(self) -> int:
        self.counter += 1
        return mint(self.client, self.counter)

    def submit(self, cpus: int | tuple[int, ...] = 1, session: int = 0, attempts: int = 1,
               **fields) -> int:
        degrees = (cpus,) if isinstance(cpus, int) else cpus
        kind = fields.pop("kind", Kind.FILE if degrees == (0,) else Kind.EXEC)
        action = Action(self.id(), "x", kind, degrees, session=session, attempts_max=attempts,
                        **fields)
        self.now += 1
        self.happen(ev.ActionSubmitted(self.now, action))
        return action.id

    def session(self, mem: int = 10, component: str = "", **fields) -> int:
        spec = SessionSpec(self.id(), "s", mem, component, **fields)
        self.happen(ev.SessionRequested(self.now, spec))
        return spec.id

    def lease_of(self, action: int) -> int:
        return self.ledger.actions[action].lease

    def finish(self, action: int, state: ActionState = ActionState.COMPLETED,
               clean: bool = True) -> list[de.Decision]:
        self.now += 1
        number = self.lease_of(action)
        lease = self.ledger.leases.get(number)
        ran = self.now - lease.granted_at if lease is not None and lease.begun else 1
        return self.happen(ev.LeaseFinished(self.now, number, Outcome(state, exec_ns=ran), clean))

    def plan_until(self, done: Callable[[], object], by: int) -> None:
        """Goes on from deadline to deadline until `done`, which has to be so by that time."""
        while not done():
            at = self.scheduler.next_deadline()
            assert self.now < at <= by, "nobody looks again in time"
            self.now = at
            self.plan()

    def drain(self) -> None:
        """Lets all that runs and waits complete."""
        while self.ledger.leases or len(self.ledger.ready):
            for lease in list(self.ledger.leases):
                self.happen(ev.LeaseFinished(self.now, lease, Outcome(ActionState.COMPLETED), True))
            self.now = max(self.now, self.scheduler.next_deadline())
            self.plan()


def started(made: list[de.Decision]) -> list[int]:
    """The actions that these decisions start, in order."""
    return [d.action for d in made if isinstance(d, de.StartLease)]


def replies(made: list[de.Decision]) -> dict[int, ActionState]:
    """The actions that these decisions end, and how."""
    return {d.action: d.outcome.state for d in made if isinstance(d, de.ReplyToClient)}
