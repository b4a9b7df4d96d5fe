"""A simulation with messages: the real broker and worker drivers with real frames.

Only the adapters of the ports are modelled: clock, links, journal, machines, Slurm, and one client
that plays the workload. Times are the broker's, so the run time in a record includes the time of
two messages. `SimulationWorld` shows what the policy decides; this simulation also shows whether
the drivers work together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..accounting.record import Fold
from ..broker.broker_settings import Settings
from ..broker.driver import Broker
from ..broker.satellites import SatelliteScripts
from ..domain import event as ev
from ..domain.allocation import AllocPolicy
from ..domain.node import NodeSpec
from ..domain.states import ActionState
from ..errors import InfeasibleRequest, InvalidInput
from ..protocol import message as ms
from ..scheduler.placement.placers.base import Placer
from ..scheduler.scheduler import Scheduler
from ..worker.driver import WorkerDriver
from .event_queue import EventQueue
from .log import Log
from .machine import Machine
from .model_slurm import ModelSlurm, SlurmQueueModel
from .network import CYCLE, FLUSH, MemoryJournal, SimulatedLink, SimulatedTimer
from .run_records import FORMAT, RunRecords
from .workload import Cluster, WorkAction, Workload, check_match, to_ns
from .workload_client import TrajectoryState, WorkloadClient

JOB = "1"  # the job id by which workers name their allocation


class Failure(NamedTuple):
    """A node dies, and joins again as a new one `back_ns` later (0 for never)."""

    node: str
    at_ns: int
    back_ns: int = 0


class Growth(NamedTuple):
    """The policy that asks for satellites, and how the modelled Slurm treats requests."""

    policy: AllocPolicy
    queue: SlurmQueueModel


class MessageWorld:
    """One run over simulated links.

    Args:
        work, cluster: What is simulated.
        placer: The placer under test.
        oracle: Whether actions carry their profile.
        latency_ns: Each message takes at least this and at most twice this time; 0 for no time.
        seed: Seed from which latencies and Slurm's waiting times are drawn.
        failures: Nodes that die.
        check: Whether the ledger's invariants are checked after every event (slow).
        growth: How satellites come; None for no satellites.

    Raises:
        InvalidInput: Workload and cluster do not go together, or a failure names an unknown node.
    """

    def __init__(self, work: Workload, cluster: Cluster, placer: Placer, oracle: bool,
                 latency_ns: int = 0, seed: int = 0, failures: Sequence[Failure] = (),
                 check: bool = False, growth: Growth | None = None) -> None:
        check_match(work, cluster)
        self._work, self._cluster, self._check = work, cluster, check
        self._resize_ns = cluster.resize_ns()
        self._latency_ns, self._rng = latency_ns, random.Random(seed)
        self.event_queue, self.scheduler = EventQueue(), Scheduler(placer)
        self.event_queue.now = -8 * latency_ns  # all workers have joined when the step begins, at 0
        self.client: WorkloadClient | None = None
        specs = cluster.node_specs(JOB)
        settings = Settings(JOB, "", len(specs), services=tuple(cluster.service_specs(work)),
                            endpoints=tuple(cluster.endpoint_specs()),
                            policy=growth.policy if growth is not None else None)
        self._log: Log | None = None
        self.usage = Fold()
        self.slurm, scripts = None, SatelliteScripts()
        if growth is not None:
            self.slurm = ModelSlurm(self.event_queue, growth.queue, seed, self._join_worker,
                                    self._kill)
            # the modelled Slurm takes the script for the name of the workers' component
            scripts = SatelliteScripts({s.name: s.component for s in growth.policy.shapes})
        self.broker = Broker(self.scheduler, MemoryJournal(self._note), self.event_queue,
                             SimulatedTimer(self.event_queue, CYCLE), settings, lambda: None,
                             slurm=self.slurm, scripts=scripts)
        self._oracle, self._failures = oracle, failures
        self._due: list[TrajectoryState] = []
        waits = [to_ns(t.start_s) for t in work.trajectories] + [
            to_ns(turn.think_s) for t in work.trajectories for turn in t.turns]
        self._busy_at = 0
        self._patience_ns = 3600 * 10**9 + 2 * max(waits, default=0)
        self.links: list[SimulatedLink] = []
        self._alive: dict[str, Callable[[str], None]] = {}  # how to kill the worker of each node
        self.broker.start()
        for spec in specs:
            self._join_worker(spec)
        names = {spec.name: spec for spec in specs}
        for failure in failures:
            if failure.node not in names:
                raise InvalidInput(f"failure of {failure.node!r}: the cluster has no such node")
            self._plan_failure(failure, names[failure.node])
        self._to_broker = self._converse(self._from_broker)
        self._to_broker.send(ms.ClientHello(ms.PROTOCOL_VERSION, JOB, "step"))
        self._to_broker.flush()

    def run(self, on_progress: Callable[[int], object] = lambda left: None) -> RunRecords:
        """Simulates the workload to its end.

        Args:
            on_progress: Called at each step with the number of trajectories that have not ended.

        Raises:
            InvalidInput: The policy or the cluster can never finish this workload.
        """
        while self.client is None or self.client.left:
            at = self.event_queue.next_at()
            assert at is not None, "the broker's own timers have stopped"
            self.event_queue.now = at
            item = self.event_queue.take()
            if isinstance(item, TrajectoryState):
                if not self._due:
                    self.event_queue.put(at, FLUSH, self._submit_due)
                self._due.append(item)
            else:
                item()
                if self._check:
                    self.scheduler.ledger.check()
            if self.client is not None:
                on_progress(self.client.left)
            if self.client is not None and self._stuck():
                raise InfeasibleRequest(f"policy {self.scheduler.state.placer.name}: "
                                        f"{self.client.left} trajectories never end")
        assert self._log is not None
        head: dict[str, Any] = {"format": FORMAT, "workload": self._work.name,
                "policy": self.scheduler.state.placer.name, "latency_ns": self._latency_ns}
        if self._failures:
            head["failures"] = [[*failure] for failure in self._failures]
        self.usage.last_ns = self.event_queue.now
        self.usage.close()
        return RunRecords(head, self._log.ordered(), self.client.step_ns)

    def _stuck(self) -> bool:
        """Whether no action has run and no event has come for longer than any pause of the
        workload.
        """
        assert self.client is not None
        if self.scheduler.ledger.leases:
            self._busy_at = self.event_queue.now
        return self.event_queue.now - max(self.client.moved_at, self._busy_at) > self._patience_ns

    # ---- the parts ---------------------------------------------------------------------------

    def _link(self) -> SimulatedLink:
        link = SimulatedLink(self.event_queue, self._latency_ns, self._rng)
        self.links.append(link)
        return link

    def _join_worker(self, spec: NodeSpec) -> None:
        down, up = self._link(), self._link()
        worker = WorkerDriver(
            JOB, spec, up, SimulatedTimer(self.event_queue, FLUSH),
            lambda reports, welcome: Machine(self.event_queue, reports, self._work_of,
                                             self._resize_ns.get(spec.name, 0)),
            lambda why: self._ended(spec.name, why))
        down.receive = worker.receive
        peer = self.broker.accept(down)
        up.receive = lambda message, payload: self.broker.receive(peer, message, payload)
        worker.start()

        def die(why: str) -> None:
            up.cut()
            down.cut()
            worker.lost(why)
            self.broker.lost(peer, why)
        self._alive[spec.name] = die

    def _ended(self, name: str, why: str) -> None:
        """Handles the end of a worker that was told to end: no message of it arrives any more."""
        if self.slurm is not None:
            self._kill(name, why)
            self.slurm.worker_ended(name)

    def _kill(self, name: str, why: str) -> None:
        die = self._alive.pop(name, None)
        if die is not None:
            die(why)

    def _plan_failure(self, failure: Failure, spec: NodeSpec) -> None:
        self.event_queue.put(failure.at_ns, 0, lambda: self._kill(spec.name, "it failed"))
        if failure.back_ns:
            self.event_queue.put(failure.at_ns + failure.back_ns, 0,
                                 lambda: self._join_worker(spec))

    def _converse(self, receive: object) -> SimulatedLink:
        down, up = self._link(), self._link()
        down.receive = receive  # type: ignore[assignment]
        peer = self.broker.accept(down)
        up.receive = lambda message, payload: self.broker.receive(peer, message, payload)
        return up

    def _work_of(self, action: int) -> WorkAction:
        assert self.client is not None
        return self.client.submission(action).work

    def _note(self, event: ev.Event) -> None:
        self.usage.add(event)
        if self._log is not None:
            self._log.note(event)

    # ---- the client --------------------------------------------------------------------------

    def _from_broker(self, message: ms.AnyMessage, payload: memoryview | None) -> None:
        if isinstance(message, ms.Welcome):
            self.client = WorkloadClient(self._work, self.event_queue, self._oracle,
                                 self.scheduler.state.placer.reserve > 0)
            self._log = Log(self.client, self.scheduler.ledger)
            return
        client = self.client
        assert client is not None
        if isinstance(message, ms.ActionResult):
            self._to_broker.send(ms.Ack((message.action,)))
            if message.outcome.state is ActionState.COMPLETED:
                session = client.ended(message.action)
                if session:
                    self._to_broker.send(ms.ReleaseSession(session))
            else:
                self._again(message.action, message.attempt)
            self.event_queue.put(self.event_queue.now, FLUSH, self._to_broker.flush)
        elif isinstance(message, ms.SessionUp):
            client.admitted(message.session)
        elif isinstance(message, ms.SessionDown):
            client.lost(message.session)
        elif isinstance(message, ms.Rejected) and message.lost:
            self._again(message.id, 0)
            self.event_queue.put(self.event_queue.now, FLUSH, self._to_broker.flush)
        elif isinstance(message, ms.Rejected):
            raise InfeasibleRequest(f"workload {self._work.name}: {message.text}")

    def _again(self, action: int, leases: int) -> None:
        assert self.client is not None
        spec, again = self.client.failed(action, leases)
        if spec is not None:
            self._to_broker.send(ms.RequestSession(spec))
        self._to_broker.send(ms.Submit(again), b"")

    def _submit_due(self) -> None:
        assert self.client is not None
        due, self._due = sorted(self._due, key=lambda state: state.index), []
        for state in due:
            spec, actions = self.client.due(state)
            if spec is not None:
                self._to_broker.send(ms.RequestSession(spec))
            for action in actions:
                self._to_broker.send(ms.Submit(action), b"")
            if not actions and (session := self.client.over(state)):
                self._to_broker.send(ms.ReleaseSession(session))
        self._to_broker.flush()
