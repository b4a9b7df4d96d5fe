"""Checks what clients saw and what was executed against what is promised, for each kind of action.

=================  ==============================================================================
every action       answered once, with its own result; in accounting with the same state
command, function  executed once, and once more for each node that died while it had the action
with `once`        as these; all submissions of the name get one result
in a session       executed once; not answered only if the session's node was lost, or its owner
                   closed it
call of a service  executed at least once, answered once; refused only while its node was gone
grant              carried out once; never more of them at a time than the endpoint's limit
=================  ==============================================================================

A restart of the broker is none of these reasons. What died when is read from the journal.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tangram_hpc.accounting.record import ActionRecord, Fold
from tangram_hpc.accounting.starts import without_gaps
from tangram_hpc.broker.unacknowledged import RESULT_LOST
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.ids import show
from tangram_hpc.storage.journal_segments import read_journals

from .actions_of_clients import CONCURRENCY, Seen

RETRIES = 2


@dataclass
class Journaled:
    """What the journal says.

    Attributes:
        records: the accounting of each action, by the id that clients show.
        lost: how often the node of an action was lost while it had a lease of it, by that id.
        lost_sessions: sessions whose node was lost, by id.
        lost_results: actions that had ended, and whose results were lost with their nodes.
        closed: why sessions ended, by id.
        gone: for each node that was lost, from when until when no node of its name was there, in
            epoch ns; the end is 0 if none came.
        starts: how many brokers served.
    """

    records: dict[str, ActionRecord] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    lost_sessions: set[str] = field(default_factory=set)
    lost_results: set[str] = field(default_factory=set)
    closed: dict[str, str] = field(default_factory=dict)
    gone: list[list[int]] = field(default_factory=list)
    starts: int = 0


def read_journaled(folder: Path) -> Journaled:
    """Reads all journals of a job; O(events)."""
    told, fold = Journaled(), Fold()
    leases: dict[int, tuple[int, int]] = {}  # lease -> action, node
    places: dict[int, int] = {}  # session -> node
    names: dict[int, str] = {}  # node -> its name
    missing: dict[str, list[int]] = {}  # name -> its entry of `gone`
    for event in without_gaps(read_journals(folder)):
        fold.add(event)
        match event:
            case ev.BrokerStarted():
                told.starts += 1
            case ev.LeaseGranted():
                leases[event.lease] = event.action, event.node
            case ev.LeaseFinished() | ev.LeaseReturned():
                leases.pop(event.lease, None)
            case ev.ActionCancelled() if event.reason == RESULT_LOST:
                told.lost_results.add(show(event.action))
            case ev.SessionPlaced():
                places[event.session] = event.node
            case ev.SessionClosed():
                places.pop(event.session, None)
                told.closed[show(event.session)] = event.reason
            case ev.NodeJoined():
                names[event.node] = event.spec.name
                if event.spec.name in missing:
                    missing.pop(event.spec.name)[1] = event.at
            case ev.NodeLost():
                gap = missing.setdefault(names[event.node], [event.at, 0])
                told.gone.append(gap)
                told.lost.update(show(action) for action, node in leases.values()
                                 if node == event.node)
                told.lost_sessions |= {show(session) for session, node in places.items()
                                       if node == event.node}
    fold.close()
    told.records = {show(action): record for action, record in fold.records.items()}
    return told


class Promises:
    """Compares everything; O(actions).

    Args:
        outcomes: the folder of what the clients saw.
        effects: the file of executions.
        journaled: what the journal says.

    Attributes:
        wrong: each broken promise, in words.
        seen: what the clients saw.
        excused: how many actions got no result for a promised reason, such as a lost session.
        executed: how often actions of each kind were executed, by kind and number.
    """

    def __init__(self, outcomes: Path, effects: Path, journaled: Journaled) -> None:
        self.wrong: list[str] = []
        self.seen = list(_seen(outcomes))
        self.excused: Counter[str] = Counter()
        self.executed: dict[str, Counter[int]] = defaultdict(Counter)
        self._ran, self._journaled = Counter(effects.read_text().split("\n")), journaled
        del self._ran[""]
        by_name: dict[str, list[Seen]] = defaultdict(list)
        for seen in self.seen:
            if seen.kind == "attach":
                self._attach(seen)
            else:
                by_name[seen.name].append(seen)
        for name, group in by_name.items():
            self._executions(name, group)
            for seen in group:
                self._answer(seen)
        for name in self._ran.keys() - by_name.keys():
            self.wrong.append(f"{name}: it was executed, and no client has an answer to it")
        self._accounting()
        self._endpoint()

    def _executions(self, name: str, group: Sequence[Seen]) -> None:
        first, ran = group[0], self._ran[name]
        self.executed[first.kind][ran] += 1
        if len(group) != len({seen.again for seen in group}):
            self.wrong.append(f"{name}: it was answered more than once")
        answered = any(not seen.error for seen in group)
        lost = sum(self._journaled.lost[seen.id] for seen in group)
        most = {"session": 1, "attached": 1, "grant": 1}.get(first.kind, 1 + min(lost, RETRIES))
        if first.kind == "call":
            most = max(most, ran)
        if not answered <= ran <= most:
            self.wrong.append(f"{name}: a {first.kind}, executed {ran} times; {lost} nodes died "
                              f"under it")
        if len({seen.value for seen in group if not seen.error}) > 1:
            self.wrong.append(f"{name}: one name has two results: "
                              f"{[seen.value for seen in group]}")

    def _answer(self, seen: Seen) -> None:
        if seen.state == "HUNG":
            self.wrong.append(f"{seen.name}: a {seen.kind} ({seen.id}) that hung")
        elif not seen.error:
            if seen.value.split(" ")[0] != seen.name:
                self.wrong.append(f"{seen.name}: it got the result {seen.value!r:.60}")
        elif self._session_ended(seen):
            self.excused["its session ended"] += 1
        elif seen.state == "NODE_FAIL" and seen.id in self._journaled.lost_results:
            self.excused["its result was lost with its node"] += 1
        elif (seen.state == "NODE_FAIL"
              and self._journaled.lost[seen.id] > (0 if seen.session else RETRIES)):
            self.excused["its nodes died"] += 1
        elif seen.kind == "call" and seen.error.startswith("InfeasibleRequest") and any(
                since < seen.ended * 1e9 and (not until or seen.begun * 1e9 < until)
                for since, until in self._journaled.gone):
            self.excused["its engine's node was gone"] += 1
        else:
            self.wrong.append(f"{seen.name}: a {seen.kind} ({seen.id}): {seen.state} {seen.error}")

    def _attach(self, seen: Seen) -> None:
        if seen.error and seen.session not in self._journaled.closed:
            self.wrong.append(f"{seen.name}: attach to {seen.session}: {seen.error}")

    def _session_ended(self, seen: Seen) -> bool:
        """Whether the session of an action was lost with its node, or closed by its owner."""
        if not seen.session or not seen.error.startswith("SessionLost"):
            return False
        lost = seen.session in self._journaled.lost_sessions
        return lost or (seen.kind == "attached" and seen.session in self._journaled.closed)

    def _accounting(self) -> None:
        records = self._journaled.records
        told = {seen.id: seen for seen in self.seen if seen.id}
        for number, record in records.items():
            if not record.end_ns:
                self.wrong.append(f"accounting: action {number} has no end")
            seen = told.get(number)
            if seen is None:
                self.wrong.append(f"accounting: no client knows of action {number} "
                                  f"({record.state.value}, {record.action.name})")
            elif seen.state != record.state.value and (seen.state or not seen.error):
                self.wrong.append(f"accounting: action {number} ended {record.state.value}, its "
                                  f"client was told {seen.state or seen.error}")
        self.wrong += [f"accounting: it does not know action {number}, which ended {seen.state}"
                       for number, seen in told.items()
                       if seen.state and not seen.again and number not in records]

    def _endpoint(self) -> None:
        grants = [seen for seen in self.seen if seen.kind == "grant" and not seen.error]
        steps = sorted([(seen.begun, 1) for seen in grants] + [(seen.ended, -1) for seen in grants])
        at_once = 0
        for _, step in steps:
            at_once += step
            if at_once > CONCURRENCY:
                self.wrong.append(f"endpoint: {at_once} grants at once; {CONCURRENCY} are allowed")
                return


def pauses(seen: Sequence[Seen], kills: Sequence[float], others: Sequence[tuple[float, float]]
           ) -> list[float]:
    """For each kill and each thread of a client, the time without a result around it, less that
    thread's usual time between two results. Sorted; O(kills x results).

    Args:
        seen: what the clients saw.
        kills: when the broker was killed.
        others: from when until when another disturbance may have been felt; a time without a result
            that overlaps one of these is left out.
    """
    ends: dict[str, list[float]] = defaultdict(list)
    for each in seen:
        if each.ended and not each.error:
            ends[each.name.rpartition(".")[0]].append(each.ended)
    found = []
    for times in ends.values():
        gaps = list(pairwise(sorted(times)))
        usual = statistics.median(b - a for a, b in gaps) if gaps else 0.0
        found += [b - a - usual for at in kills for a, b in gaps if a <= at < b
                  and not any(a < until and since < b for since, until in others)]
    return sorted(found)


def _seen(folder: Path) -> Iterator[Seen]:
    for path in sorted(folder.glob("*")):
        if path.suffix != ".ready":
            yield from (Seen(**json.loads(line)) for line in path.read_text().splitlines())
