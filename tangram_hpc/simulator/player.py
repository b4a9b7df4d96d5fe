"""The client's side of a simulated step: trajectories that think, act and wait for their actions.

Law: it knows the workload and tells the scheduler no more than a client may: with `oracle`
durations an action carries its profile, with `learned` ones only its name, resource and degrees.
A sandbox is asked for with a trajectory's first CPU action and closed with its last one; where
sessions reserve CPUs (`static:K`) it is asked for when the trajectory starts, and thinking begins
with its admission.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..domain.action import Action, Profile
from ..domain.ids import mint
from ..domain.session import SessionSpec
from .clock import Agenda
from .workload import Trajectory, WorkAction, Workload, to_ns

CLIENT = 1


@dataclass(slots=True)
class Play:
    """One trajectory under way."""

    index: int
    spec: Trajectory
    cpu_left: int  # CPU actions that have not ended
    early: bool  # it submits as if it had been admitted at once (reserved sessions)
    turn: int = -1
    open: int = 0  # actions of this turn that have not ended
    session: int = 0
    late_ns: int = 0  # how long admission took
    submitted: bool = False
    moved: bool = False  # its sandbox was lost and nothing has run in the next one yet


@dataclass(slots=True)
class Submission:
    """An action of the workload on its way; `ready` is when its record says it was submitted."""

    play: Play
    turn: int
    index: int
    work: WorkAction
    ready: int
    session: int = 0
    attempt: int = 0  # leases that ended badly under earlier ids


class Player:
    """All trajectories: what each asks for at an instant, and what follows for it from an end."""

    def __init__(self, work: Workload, agenda: Agenda, oracle: bool, reserved: bool) -> None:
        self._agenda, self._oracle, self._reserved = agenda, oracle, reserved
        self._minted = 0
        self._of_action: dict[int, Submission] = {}
        self._of_session: dict[int, Play] = {}
        self.left = 0
        self.step_ns = 0
        self.moved_at = agenda.now  # when something of the workload last happened
        for index, spec in enumerate(work.trajectories):
            cpus = sum(a.resource == "cpu" for t in spec.turns for a in t.actions)
            play = Play(index, spec, cpus, reserved and cpus > 0)
            self.left += 1
            if play.early:
                agenda.put(to_ns(spec.start_s), 1, play)
            else:
                self._think(play, to_ns(spec.start_s))

    def submission(self, action: int) -> Submission:
        """Which action of the workload an id stands for."""
        return self._of_action[action]

    def due(self, play: Play) -> tuple[SessionSpec | None, list[Action]]:
        """What a trajectory asks for at this instant: perhaps a session, perhaps actions."""
        self.moved_at = self._agenda.now
        if play.early and not play.session and play.turn < 0:
            return self._request(play), []
        spec, actions, turn = None, [], play.spec.turns[play.turn]
        for k, work in enumerate(turn.actions):
            if work.resource == "cpu" and not play.session:
                spec = self._request(play)
            ready = self._agenda.now - (0 if play.submitted else play.late_ns)
            action = self._action(play, work)
            self._of_action[action.id] = Submission(play, play.turn, k, work, ready,
                                                    action.session)
            actions.append(action)
        play.open = len(actions)
        play.submitted = play.submitted or bool(actions)
        if not actions:
            self._think(play, self._agenda.now)
        return spec, actions

    def admitted(self, session: int) -> None:
        """A session stands."""
        play = self._of_session[session]
        if play.early and play.turn < 0:
            play.late_ns = self._agenda.now - to_ns(play.spec.start_s)
            self._think(play, self._agenda.now)

    def ended(self, action: int) -> int:
        """An action ended; the session to close with it, 0 for none."""
        was = self._of_action.pop(action)
        play, now = was.play, self._agenda.now
        self.moved_at = now
        play.open -= 1
        play.cpu_left -= was.work.resource == "cpu"
        if not play.open:
            self._think(play, now)
        return self._closes(play)

    def failed(self, action: int, leases: int) -> tuple[SessionSpec | None, Action]:
        """An action was lost with its node, after so many leases: what to ask for instead."""
        was, spec = self._of_action.pop(action), None
        if was.session and was.play.session == was.session:
            self.lost(was.session)
            spec = self._request(was.play)
        again = self._action(was.play, was.work)
        self._of_action[again.id] = Submission(was.play, was.turn, was.index, was.work, was.ready,
                                               again.session, was.attempt + leases)
        return spec, again

    def lost(self, session: int) -> None:
        """A sandbox is gone; the next CPU action asks for another."""
        play = self._of_session.pop(session, None)
        if play is not None and play.session == session:
            play.session, play.moved = 0, True

    def _closes(self, play: Play) -> int:
        over = play.turn >= len(play.spec.turns) if play.early else not play.cpu_left
        session = play.session if over else 0
        if session and session in self._of_session:
            del self._of_session[session]
            return session
        return 0

    def _think(self, play: Play, now: int) -> None:
        play.turn += 1
        if play.turn < len(play.spec.turns):
            self._agenda.put(now + to_ns(play.spec.turns[play.turn].think_s), 1, play)
        else:
            self.left -= 1
            self.step_ns = max(self.step_ns, now)

    def _request(self, play: Play) -> SessionSpec:
        self._minted += 1
        play.session = mint(CLIENT, self._minted)
        self._of_session[play.session] = play
        return SessionSpec(play.session, play.spec.trajectory, play.spec.session.mem_mib,
                           parallel=True)

    def _action(self, play: Play, work: WorkAction) -> Action:
        self._minted += 1
        profile = Profile(to_ns(work.work_s), round(work.serial * 1_000_000))
        cpu = work.resource == "cpu"
        return Action(mint(CLIENT, self._minted), work.name, degrees=work.degrees,
                      key=work.resource, session=play.session if cpu else 0,
                      attempts_max=1 if cpu else 3, resizable=cpu and work.resize,
                      profile=profile if self._oracle else None)
