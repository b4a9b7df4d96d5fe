"""Makes the simulator's inputs, a workload and a cluster, from the journal of a job that has run.

The idea: a trajectory alternates between thinking and acting. What a trajectory thought is the time
between the end of all actions that it had asked for and its next request; how large an action is
follows from how long it ran on the units that it held. Played again under the placer that ran, such
a workload gives the recorded times; played under another one it says what that placer would have
needed for the same actions.

Actions that hold no unit (files) and processes in the background are not played: the first count as
time to think. `LeftOut` says how many actions of the job could not be played, and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...accounting.record import ActionRecord, Fold
from ...domain.action import Action, Kind
from ...domain.ids import client_of, show
from ...domain.service import MICRO
from ...domain.states import ENDED_BY_ITSELF
from ...errors import InvalidInput
from ...scheduler.state.estimator import Estimator, cpu_to_learn, work_of
from ..workload import (
    Cluster,
    ClusterEndpoint,
    ClusterNode,
    ClusterService,
    SessionNeed,
    WorkAction,
    Workload,
    WorkloadTrajectory,
    WorkloadTurn,
)
from .run_witness import NodeStay, RunWitness, group_by_trajectory

_SECOND = 10**9
_TOGETHER_NS = 10**7  # a session that was requested so shortly before an action came with it
_PLAYED = (Kind.EXEC, Kind.FUNCTION, Kind.CALL, Kind.GRANT)


@dataclass
class LeftOut:
    """Actions of the job that the simulation leaves out or changes.

    Attributes:
        unended: Actions that never started or have not ended.
        whole_gpus: Actions that held whole GPUs, which are played with their CPUs only.
        unprofiled: Actions on several CPUs whose serial fraction is an estimate.
        retried: Actions that started more than once, which are played once.
        bound: Actions that were bound to a component, which are played on any node.
    """

    unended: int = 0
    whole_gpus: int = 0
    unprofiled: int = 0
    retried: int = 0
    bound: int = 0


@dataclass
class RecordedRun:
    """Holds a job, or the part of it that began first, as the simulator can play it again.

    Attributes:
        work: Its trajectories.
        cluster: All nodes that it ever had, its services and its endpoints.
        left_out: What is not played as it was, of the whole job.
        begun_ns: The time of the workload's start, ns since the epoch.
        played: For each trajectory of the workload, the ids of its actions.
        stays: The stays of its nodes.
        actions_of_job: How many actions of the whole job can be played.
        cut: Whether it is the first turns of one trajectory only.
    """

    work: Workload
    cluster: Cluster
    left_out: LeftOut
    begun_ns: int
    played: list[list[int]]
    stays: list[NodeStay]
    actions_of_job: int
    cut: bool

    @property
    def numbers(self) -> list[int]:
        """Returns the ids of all its actions."""
        return [number for numbers in self.played for number in numbers]


def recorded_run(folded: Fold, witness: RunWitness, actions_max: int | None = None
                 ) -> RecordedRun | None:
    """Returns a job as the simulator can play it again; None if it had no node, or if none of its
    actions can be played. O(actions).

    Args:
        folded: The records of its actions.
        witness: What was there meanwhile; it has taken the same events.
        actions_max: So many actions at most are returned, those of the trajectories that began
            first. If already the first trajectory has more, its first turns are returned. None for
            the whole job.

    Raises:
        InvalidInput: Not even the first turn has so few actions.
    """
    left_out, played = LeftOut(), list[ActionRecord]()
    for record in folded.records.values():
        if _is_played(record, witness, left_out):
            played.append(record)
    if not played or not witness.stays:
        return None
    serial = _Serials(played)
    left_out.unprofiled = serial.estimated
    drafts = _drafts(played, witness)
    if actions_max is not None:  # before the costly part, as a job may have a million actions
        drafts = _first(drafts, actions_max)
    begun_ns = min(draft.start_ns for draft in drafts)
    names = _names(drafts, witness)
    trajectories = tuple(_trajectory(name, draft, begun_ns, witness, serial)
                         for name, draft in zip(names, drafts, strict=True))
    work = Workload(name=folded.job or "recorded", trajectories=trajectories)
    numbers = [[r.action.id for turn in draft.turns for r in turn] for draft in drafts]
    return RecordedRun(work, _cluster(witness), left_out, begun_ns, numbers,
                       [*witness.stays.values()], len(played), drafts[0].cut)


def _is_played(r: ActionRecord, witness: RunWitness, left_out: LeftOut) -> bool:
    kind, name, units = r.action.kind, r.action.key.partition(":")[2], r.action.degrees[0]
    if kind not in _PLAYED or not units:
        return False
    if (kind is Kind.CALL and name not in witness.services) or (
            r.action.key.startswith("endpoint:") and name not in witness.endpoints):
        return False
    if not r.elapsed_ns:
        left_out.unended += 1
        return False
    left_out.whole_gpus += r.action.gpus > 0
    left_out.retried += r.attempt > 1
    left_out.bound += bool(r.action.component)
    return True


# ---- actions ------------------------------------------------------------------------------------


def _spans(r: ActionRecord) -> list[tuple[int, int]]:
    """Returns the sizes of the last attempt in order: units, ns."""
    if r.action.key != "cpu":
        held_ns = r.elapsed_ns
        if r.gpus and r.outcome is not None:  # the calls of a batch share its time
            held_ns = (r.outcome.exec_ns or held_ns) // r.outcome.batch
        return [(max(1, len(r.gpus)), held_ns)]
    ends = [*(at for at, _ in r.grants[1:]), r.end_ns]
    return [(len(cores), max(0, end - at))
            for (at, cores), end in zip(r.grants, ends, strict=True)]


def _run_spans(r: ActionRecord) -> list[tuple[int, int]]:
    """Returns what the estimator learns from: of one size, the run time that the node measured."""
    spans = _spans(r)
    if r.action.key == "cpu" and len(spans) == 1 and r.outcome is not None and r.outcome.exec_ns:
        [(units, held_ns)] = spans
        return [(units, min(held_ns, r.outcome.exec_ns))]
    return spans


class _Serials:
    """The serial fraction of each action: its caller's, else the one that explains best how long
    the actions of its class ran and what CPU time they used, as the scheduler's own estimator finds
    it.
    """

    def __init__(self, records: Iterable[ActionRecord]) -> None:
        self._estimator, self.estimated = Estimator(), 0
        for r in records:
            if r.action.profile is None and r.action.degrees[-1] > 1:
                self.estimated += 1
                self._estimator.began(r.action)
                spans, cpu_ns = _run_spans(r), 0
                if (r.action.key == "cpu" and r.outcome is not None
                        and r.outcome.state in ENDED_BY_ITSELF):
                    cpu_ns = cpu_to_learn(r.outcome, spans)
                self._estimator.ended(r.action, spans, True, cpu_ns)

    def of(self, action: Action) -> float:
        """Returns the serial fraction, 0 to 1."""
        if action.profile is not None:
            return action.profile.serial_ppm / 10**6
        return self._estimator.serial(action) / 1000


def _work_action(r: ActionRecord, serials: _Serials) -> WorkAction:
    serial = serials.of(r.action)
    spans = _spans(r)
    work_ns = (spans[0][1] if len(spans) == 1 and spans[0][0] == 1 else
               work_of(spans, round(serial * 1000)))
    return WorkAction(name=r.action.name, resource=r.action.key, work_s=work_ns / _SECOND,
                      degrees=r.action.degrees, serial=serial, mem_mib=r.action.mem_mib,
                      resize=r.action.resizable)


# ---- trajectories -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """A trajectory: when it began, from when it thought of its first action (ns since the epoch),
    its turns, and whether its last turns were left out.
    """

    start_ns: int
    thinks_from_ns: int
    turns: list[list[ActionRecord]]
    cut: bool = False


def _drafts(played: list[ActionRecord], witness: RunWitness) -> list[_Draft]:
    """Returns all trajectories in the order in which they began. Trajectories that began together
    are in the order of their sessions' requests, in which placers deal with them.
    """
    place = {session: number for number, session in enumerate(witness.sessions)}
    found = []
    for records in group_by_trajectory(played, witness):
        turns = _turns(records)
        start_ns, thinks_from_ns = _beginning(records, turns, witness)
        asked = min(place.get(r.action.session, len(place)) for r in records)
        found.append((start_ns, asked, _Draft(start_ns, thinks_from_ns, turns)))
    return [draft for _, _, draft in sorted(found, key=lambda each: each[:2])]


def _first(drafts: list[_Draft], actions_max: int) -> list[_Draft]:
    """Returns the first drafts, or the first turns of the first one; see `recorded_run`."""
    sizes = [[len(turn) for turn in draft.turns] for draft in drafts]
    count = sum(end <= actions_max for end in accumulate(map(sum, sizes)))
    if count:
        return drafts[:count]
    turns = sum(end <= actions_max for end in accumulate(sizes[0]))
    if not turns:
        raise InvalidInput(f"the first turn has {sizes[0][0]} actions, more than the {actions_max} "
                           f"that are simulated; `tangram report --simulate {sizes[0][0]}` "
                           "simulates them")
    return [replace(drafts[0], turns=drafts[0].turns[:turns], cut=True)]


def _beginning(records: list[ActionRecord], turns: list[list[ActionRecord]], witness: RunWitness
               ) -> tuple[int, int]:
    """Returns when a trajectory began, and from when it thought of its first action.

    It begins when its session is requested, and thinks from when the session is ready. Where the
    session is requested with the first action, the journal does not say how long the policy thought
    before. It counts as having thought as long as before its later turns, in the mean, but not from
    before its client was there.
    """
    first = records[0].submit_ns
    opened = [s for r in records if (s := witness.sessions.get(r.action.session)) is not None]
    asked = min((s.asked_ns for s in opened), default=first)
    if asked < first - _TOGETHER_NS:
        ready = min(s.ready_ns for s in opened if s.asked_ns == asked)
        return asked, (ready if asked < ready <= first else asked)
    later = [max(0, turn[0].submit_ns - max(r.end_ns for r in before))
             for before, turn in pairwise(turns)]
    think_ns = sum(later) // len(later) if later else 0
    joined = witness.joined_ns.get(client_of(records[0].action.id), 0)
    start = min(first, max(joined, first - think_ns))
    return start, start


def _turns(records: list[ActionRecord]) -> list[list[ActionRecord]]:
    """Cuts a trajectory into turns: one begins when all that was submitted before has ended."""
    turns: list[list[ActionRecord]] = []
    until = 0
    for r in records:
        if not turns or r.submit_ns >= until:
            turns.append([])
        turns[-1].append(r)
        until = max(until, r.end_ns)
    return turns


def _trajectory(name: str, draft: _Draft, begun_ns: int, witness: RunWitness, serials: _Serials
                ) -> WorkloadTrajectory:
    told, until = list[WorkloadTurn](), draft.thinks_from_ns
    for turn in draft.turns:
        told.append(WorkloadTurn(think_s=max(0, turn[0].submit_ns - until) / _SECOND,
                                 actions=tuple(_work_action(r, serials) for r in turn)))
        until = max(r.end_ns for r in turn)
    sessions = [s for turn in draft.turns for r in turn
                if (s := witness.sessions.get(r.action.session)) is not None]
    closed = max([0, *(s.closed_ns for s in sessions if s.by_client)])
    if not draft.cut and closed > until + _TOGETHER_NS:  # it thought on, its session still open
        told.append(WorkloadTurn(think_s=(closed - until) / _SECOND, actions=()))
    mem_mib = [s.spec.mem_mib for s in sessions]
    return WorkloadTrajectory(
        trajectory=name, start_s=(draft.start_ns - begun_ns) / _SECOND,
        session=SessionNeed(mem_mib=max([0, *mem_mib])), turns=tuple(told))


def _names(drafts: list[_Draft], witness: RunWitness) -> list[str]:
    """A name for each trajectory: its session's, its own, or its first action's id; each once."""
    names = dict[str, int]()
    for draft in drafts:
        records = [r for turn in draft.turns for r in turn]
        name = next((s.spec.name for r in records
                     if (s := witness.sessions.get(r.action.session)) and s.spec.name), "")
        name = name or records[0].action.trajectory_name or show(records[0].action.id)
        while name in names:
            names[name] += 1
            name = f"{name} ({names[name]})"
        names[name] = 1
    return [*names]


# ---- the cluster --------------------------------------------------------------------------------


def _cluster(witness: RunWitness) -> Cluster:
    return Cluster(
        nodes=tuple(ClusterNode(name=n.name, count=1, cpus=len(n.cores), mem_mib=n.mem_mib,
                                gpus=len(n.gpus), sockets=1) for n in witness.nodes.values()),
        services=tuple(ClusterService(name=s.name, restore_s=s.restore_ns / _SECOND,
                                      weights_mib=s.weights_mib)
                       for s in witness.services.values()),
        endpoints=tuple(ClusterEndpoint(
            name=e.name, concurrency=e.concurrency,
            rate_per_s=e.rate_micro / MICRO if e.rate_micro else None,
            burst=max(1.0, e.burst_micro / MICRO)) for e in witness.endpoints.values()))
