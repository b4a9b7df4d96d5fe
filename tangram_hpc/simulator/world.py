"""A simulated step: the real scheduler, modelled machines, and a simulated clock.

Sandboxes open and close in no time, and orders travel in no time.

Invariants: all events of one instant are applied before anything starts, and among them ends come
before all others. Only `Scheduler.plan` decides what starts. The same input gives the same events
on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import decision as de
from ..domain import event as ev
from ..domain.outcome import Outcome
from ..domain.states import ActionState
from ..domain.tenant import DEFAULT_TENANT
from ..errors import InfeasibleRequest, InvalidInput
from ..scheduler.placement.placers.base import Placer
from ..scheduler.placement.placers.static import Static, assign_gpus
from ..scheduler.policy.admission import refusal, refusal_of_session
from ..scheduler.scheduler import Scheduler
from . import progress
from .event_queue import EventQueue
from .log import Log
from .run_records import FORMAT, RunRecords
from .workload import Cluster, Workload, check_match
from .workload_client import TrajectoryState, WorkloadClient, clients_of

_END = 0  # priority within an instant; trajectories are 1
_IDLE_MAX = 100_000


class SimulationWorld:
    """One run. With `check` the ledger's invariants are checked after every event (slow)."""

    def __init__(self, work: Workload, cluster: Cluster, placer: Placer, oracle: bool,
                 check: bool = False) -> None:
        check_match(work, cluster)
        self._work, self._cluster, self._check = work, cluster, check
        self.scheduler = Scheduler(placer)
        self.event_queue = EventQueue()
        self.client = WorkloadClient(work, self.event_queue, oracle, placer.reserve > 0)
        self._idle = 0  # instants in a row in which only the placer was called
        # A list to which all events are added; None: not kept.
        self.events: list[ev.Event] | None = None
        self._runs: dict[int, progress.SimulatedAttempt] = {}  # by lease
        self._log = Log(self.client, self.scheduler.ledger)
        self._opened: list[int] = []  # sessions whose sandbox is being built
        self._ended: list[int] = []  # actions whose result is known
        self._resize_ns: dict[int, int] = {}  # how long a resize takes, by node

    # ---- the loop ----------------------------------------------------------------------------

    def run(self, on_progress: Callable[[int], object] = lambda left: None) -> RunRecords:
        """Simulates the workload to its end.

        Args:
            on_progress: Called at each instant with the number of trajectories that have not ended.

        Raises:
            InvalidInput: The policy or the cluster can never finish this workload.
        """
        warm = self._set_up()
        while (at := self._next_instant()) is not None and self._idle < _IDLE_MAX:
            self.event_queue.now = at
            self._instant()
            on_progress(self.client.left)
        if self.client.left:
            ready = len(self.scheduler.ledger.ready)
            raise InfeasibleRequest(f"policy {self.scheduler.state.placer.name}: "
                                    f"{self.client.left} trajectories never end; "
                                    f"{ready} actions wait for ever")
        head = {"format": FORMAT, "workload": self._work.name,
                "policy": self.scheduler.state.placer.name}
        return RunRecords(head | ({"services_warm": True} if warm else {}), self._log.ordered(),
                          self.client.step_ns)

    def _next_instant(self) -> int | None:
        at, deadline = self.event_queue.next_at(), self.scheduler.next_deadline()
        self._idle = self._idle + 1 if at is None else 0
        if deadline and (at is None or deadline < at) and self.client.left:
            return deadline
        return at

    def _instant(self) -> None:
        """Applies all events of this instant, then lets the scheduler start what may start."""
        while True:
            due: list[TrajectoryState] = []
            while (item := self.event_queue.take()) is not None:
                if isinstance(item, TrajectoryState):
                    due.append(item)
                else:
                    self._finish(*item)
            due.sort(key=lambda state: state.index)
            for state in due:
                self._submit(state)
            if self.event_queue.next_at() != self.event_queue.now:
                self._plan()
                if self.event_queue.next_at() != self.event_queue.now:
                    return

    def _plan(self) -> None:
        scheduler, now = self.scheduler, self.event_queue.now
        while events := scheduler.plan(now):
            for event in events:
                self._record_event(event)
            opened, self._opened = self._opened, []
            for session in opened:
                self._record_event(ev.SessionReady(now, session))

    # ---- facts and orders --------------------------------------------------------------------

    def _record_event(self, fact: ev.Event) -> None:
        for event in self.scheduler.consequences(fact):
            if self.events is not None:
                self.events.append(event)
            self._log.note(event)
            for order in self.scheduler.handle(event):
                self._perform(order)
            if self._check:
                self.scheduler.ledger.check()

    def _perform(self, order: de.Decision) -> None:
        match order:
            case de.StartLease(lease=lease, restore_ns=restore_ns):
                work = self.client.submission(order.action).work
                units = self.scheduler.ledger.leases[lease].units
                self._runs[lease] = progress.SimulatedAttempt(work, units, self.event_queue.now,
                                                              restore_ns)
                self._await(lease)
            case de.ResizeLease(lease=lease, cores=cores):
                self._runs[lease].resize(self.event_queue.now, len(cores),
                                         self._resize_ns[order.node])
                self._await(lease)
            case de.OpenSession(spec=spec):
                self._opened.append(spec.id)
            case de.AnnounceSession(session=session):
                self.client.admitted(session)
            case de.ReplyToClient(action=action):
                self._ended.append(action)

    def _await(self, lease: int) -> None:
        end_at = self._runs[lease].end_at
        if end_at is not None:
            self.event_queue.put(end_at, _END, (lease, end_at))

    def _finish(self, lease: int, end_at: int) -> None:
        run = self._runs.get(lease)
        if run is None or run.end_at != end_at:
            return  # the attempt was resized meanwhile
        del self._runs[lease]
        now = self.event_queue.now
        outcome = Outcome(ActionState.COMPLETED, exec_ns=now - run.start, cpu_ns=run.cpu_ns,
                          resize_ns=run.resize_ns)
        self._record_event(ev.LeaseFinished(now, lease, outcome, True))
        ended, self._ended = self._ended, []
        for action in ended:
            session = self.client.ended(action)
            self._record_event(ev.ActionAcknowledged(now, (action,)))
            self._close(session)

    def _close(self, session: int) -> None:
        """Closes a session; 0 is none."""
        if session:
            now = self.event_queue.now
            self._record_event(ev.SessionClosing(now, session, ""))
            self._record_event(ev.SessionClosed(now, session, ""))

    def _submit(self, state: TrajectoryState) -> None:
        spec, actions = self.client.due(state)
        ledger, placer = self.scheduler.ledger, self.scheduler.state.placer
        if spec is not None:
            self._refuse(spec.name, refusal_of_session(ledger, placer, spec))
            self._record_event(ev.SessionRequested(self.event_queue.now, spec))
        for action in actions:
            self._refuse(f"{state.spec.trajectory}.{state.turn} {action.name}",
                         refusal(ledger, placer, action))
            self._record_event(ev.ActionSubmitted(self.event_queue.now, action))
        if not actions:
            self._close(self.client.over(state))

    def _refuse(self, what: str, why: str) -> None:
        if why:
            raise InfeasibleRequest(f"workload {self._work.name}, {what}: {why}")

    # ---- the beginning -----------------------------------------------------------------------

    def _set_up(self) -> bool:
        """Adds nodes, services and endpoints; returns whether services are loaded at once."""
        for name, tenant in self._cluster.tenants.items():
            self._record_event(ev.TenantDeclared(0, tenant.spec(name)))
        for name, number in clients_of(self._work).items():
            uid = "step" if number == 1 else f"step-{number}"
            self._record_event(ev.ClientJoined(0, number, uid, uid, 0, 1, "sim"))
            if name != DEFAULT_TENANT:
                self._record_event(ev.TenantNamed(0, number, name))
        specs, takes = self._cluster.node_specs(), self._cluster.resize_ns()
        for number, node in enumerate(specs, 1):
            self._resize_ns[number] = takes[node.name]
            self._record_event(ev.NodeJoined(0, number, node))
        services = self._cluster.service_specs(self._work)
        for spec in services:
            self._record_event(ev.ServiceDeclared(0, spec))
        for endpoint in self._cluster.endpoint_specs():
            self._record_event(ev.EndpointDeclared(0, endpoint))
        self._record_event(ev.NodesComplete(0, len(specs)))
        if not services or not isinstance(self.scheduler.state.placer, Static):
            return False
        gpus = [(n, gpu) for n, node in enumerate(specs, 1) for gpu in node.gpus]
        for service, assigned in assign_gpus(services, gpus).items():
            if not assigned:
                raise InvalidInput(f"policy {self.scheduler.state.placer.name}: "
                                   f"{len(services)} services want a GPU each "
                                   f"and the cluster has {len(gpus)}")
            for number, gpu in assigned:
                self._record_event(ev.ServiceLoaded(0, service, number, (gpu,)))
        return True
