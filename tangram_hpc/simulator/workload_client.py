"""The client of a simulated step: trajectories that wait for the policy, act, and wait for results.

The client knows the workload, but tells the scheduler no more than a real client can: with `oracle`
durations an action carries its profile, with `learned` ones only its name, resource and degrees. A
session is requested with a trajectory's first CPU action and closed with its last one. Where
sessions reserve CPUs (`static:K`) it is requested when the trajectory starts, and the first turn
begins when it is admitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..domain.action import Action, Profile
from ..domain.ids import mint
from ..domain.session import SessionSpec
from ..domain.tenant import DEFAULT_TENANT
from .event_queue import EventQueue
from .workload import WorkAction, Workload, WorkloadTrajectory, to_ns


def clients_of(work: Workload) -> dict[str, int]:
    """Returns the number of the client that submits each tenant's actions, in order; 1 if there is
    no trajectory.
    """
    tenants = dict.fromkeys(one.tenant for one in work.trajectories) or {DEFAULT_TENANT: None}
    return {tenant: number for number, tenant in enumerate(tenants, 1)}


@dataclass(slots=True)
class TrajectoryState:
    """One trajectory that has not ended.

    Attributes:
        index: Its place in the workload.
        spec: What it does.
        cpu_left: CPU actions that have not ended.
        early: Whether its session is requested at its start, because sessions reserve CPUs. The
            admission time of the session is then subtracted from the submission times of its
            actions.
        turn: Index of its current turn; -1 before the first.
        open: Actions of this turn that have not ended.
        session: Id of its session; 0 for none.
        late_ns: How long the admission of its session took.
        submitted: Whether any action was submitted.
        moved: Whether its sandbox was lost and nothing has run in the next one yet.
    """

    index: int
    spec: WorkloadTrajectory
    cpu_left: int
    early: bool
    turn: int = -1
    open: int = 0
    session: int = 0
    late_ns: int = 0
    submitted: bool = False
    moved: bool = False


@dataclass(slots=True)
class Submission:
    """An action that was submitted; `ready` is its time of submission in the records."""

    state: TrajectoryState
    turn: int
    index: int
    work: WorkAction
    ready: int
    session: int = 0
    attempt: int = 0  # failed leases under earlier action ids


class WorkloadClient:
    """All trajectories: which requests each makes at an instant, and what follows when an action
    ends.

    Attributes:
        left: Trajectories that have not ended.
        step_ns: When the last trajectory ended so far, in ns.
        moved_at: When an event of the workload last happened, in ns.
    """

    def __init__(self, work: Workload, event_queue: EventQueue, oracle: bool, reserved: bool
                 ) -> None:
        self._event_queue, self._oracle, self._reserved = event_queue, oracle, reserved
        self._minted = 0
        self._client = clients_of(work)
        self._of_action: dict[int, Submission] = {}
        self._of_session: dict[int, TrajectoryState] = {}
        self.left = 0
        self.step_ns = 0
        self.moved_at = event_queue.now
        for index, spec in enumerate(work.trajectories):
            cpus = sum(a.resource == "cpu" for t in spec.turns for a in t.actions)
            state = TrajectoryState(index, spec, cpus, reserved and cpus > 0)
            self.left += 1
            if state.early:
                event_queue.put(to_ns(spec.start_s), 1, state)
            else:
                self._next_turn(state, to_ns(spec.start_s))

    def submission(self, action: int) -> Submission:
        """The action of the workload behind an action id."""
        return self._of_action[action]

    def due(self, state: TrajectoryState) -> tuple[SessionSpec | None, list[Action]]:
        """The requests of a trajectory at this instant: sessions and actions, or none."""
        self.moved_at = self._event_queue.now
        if state.early and not state.session and state.turn < 0:
            return self._request(state), []
        spec, actions, turn = None, [], state.spec.turns[state.turn]
        for k, work in enumerate(turn.actions):
            if work.resource == "cpu" and not state.session:
                spec = self._request(state)
            ready = self._event_queue.now - (0 if state.submitted else state.late_ns)
            action = self._action(state, work)
            self._of_action[action.id] = Submission(state, state.turn, k, work, ready,
                                                    action.session)
            actions.append(action)
        state.open = len(actions)
        state.submitted = state.submitted or bool(actions)
        if not actions:
            self._next_turn(state, self._event_queue.now)
        return spec, actions

    def admitted(self, session: int) -> None:
        """Notes that a session was admitted and that its sandbox is ready."""
        state = self._of_session[session]
        if state.early and state.turn < 0:
            state.late_ns = self._event_queue.now - to_ns(state.spec.start_s)
            self._next_turn(state, self._event_queue.now)

    def ended(self, action: int) -> int:
        """Notes that an action ended. Returns the session to close now; 0 for none."""
        was = self._of_action.pop(action)
        state, now = was.state, self._event_queue.now
        self.moved_at = now
        state.open -= 1
        state.cpu_left -= was.work.resource == "cpu"
        if not state.open:
            self._next_turn(state, now)
        return self._closes(state)

    def over(self, state: TrajectoryState) -> int:
        """Returns the session to close now because its trajectory has ended by thinking, without an
        action in its last turn; 0 for none.
        """
        return self._closes(state)

    def failed(self, action: int, leases: int) -> tuple[SessionSpec | None, Action]:
        """Notes that an action was lost with its node after `leases` leases.

        Returns:
            The session to request, None if the old one is kept; and the action to submit again.
        """
        was, spec = self._of_action.pop(action), None
        if was.session and was.state.session == was.session:
            self.lost(was.session)
            spec = self._request(was.state)
        again = self._action(was.state, was.work)
        self._of_action[again.id] = Submission(was.state, was.turn, was.index, was.work, was.ready,
                                               again.session, was.attempt + leases)
        return spec, again

    def lost(self, session: int) -> None:
        """Notes the loss of a session's sandbox; the next CPU action requests another session."""
        state = self._of_session.pop(session, None)
        if state is not None and state.session == session:
            state.session, state.moved = 0, True

    def _closes(self, state: TrajectoryState) -> int:
        over = state.turn >= len(state.spec.turns) if state.early else not state.cpu_left
        session = state.session if over else 0
        if session and session in self._of_session:
            del self._of_session[session]
            return session
        return 0

    def _next_turn(self, state: TrajectoryState, now: int) -> None:
        state.turn += 1
        if state.turn < len(state.spec.turns):
            self._event_queue.put(now + to_ns(state.spec.turns[state.turn].think_s), 1, state)
        else:
            self.left -= 1
            self.step_ns = max(self.step_ns, now)

    def _request(self, state: TrajectoryState) -> SessionSpec:
        self._minted += 1
        state.session = mint(self._client[state.spec.tenant], self._minted)
        self._of_session[state.session] = state
        return SessionSpec(state.session, state.spec.trajectory, state.spec.session.mem_mib,
                           parallel=True)

    def _action(self, state: TrajectoryState, work: WorkAction) -> Action:
        self._minted += 1
        profile = Profile(to_ns(work.work_s), round(work.serial * 1_000_000))
        cpu = work.resource == "cpu"
        client = self._client[state.spec.tenant]
        return Action(mint(client, self._minted), work.name, degrees=work.degrees,
                      key=work.resource, session=state.session if cpu else 0,
                      attempts_max=1 if cpu else 3, resizable=cpu and work.resize,
                      profile=profile if self._oracle else None)
