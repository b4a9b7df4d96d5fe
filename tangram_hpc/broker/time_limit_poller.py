"""Polls Slurm for the time limits of the allocations whose nodes are lent.

A worker reports the end of its allocation when it joins. `scontrol update TimeLimit` can change
that end later, and the job is not notified. The poller asks at the few times that
`scheduler.policy.ending.next_look` names, with one query for all allocations, and turns the answers
into events. It decides nothing: when a node is drained, and whether a drain is undone, is the
scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..domain.slurm import JobView
from ..ports import Clock, Slurm, SlurmRejected, SlurmTransient
from ..scheduler.policy.ending import LOOK_AHEAD_NS, hold_until, next_look
from ..scheduler.state.ledger import Ledger, NodeEntry

_SAME_NS = 2 * 10**9  # ends closer than this count as equal, as Slurm's releases round differently


class TimeLimitPoller:
    """Polls the ends of one broker's allocations.

    Args:
        slurm: None outside of a Slurm job; then no query is made.
        record_event: journals an event and applies it.
        gap_s: least time between two queries that the budget of Slurm calls allows, in seconds.
    """

    def __init__(self, slurm: Slurm | None, ledger: Ledger, clock: Clock,
                 record_event: Callable[[ev.Event], None], gap_s: float) -> None:
        self._slurm, self._ledger, self._now = slurm, ledger, clock.now_ns
        self._record_event, self._gap_ns = record_event, round(gap_s * 1e9)
        self._asked_at: dict[str, int] = {}  # by allocation: when Slurm was last asked
        self._asking = False

    def watch(self) -> None:
        """Asks Slurm when a query is due. Called every few seconds. O(nodes)."""
        if self._slurm is None or self._asking:
            return
        now, known = self._now(), self._known()
        self._asked_at = {name: at for name, at in self._asked_at.items() if name in known}
        due = {}
        for name, node in known.items():
            asked_at = self._asked_at.setdefault(name, node.joined_at)
            ends_at = node.spec.ends_at_ns
            if next_look(asked_at, node.lends_until, ends_at, self._gap_ns) <= now:
                due[name] = node
        if not due:
            return
        for name, node in due.items():
            if node.lends_until - LOOK_AHEAD_NS <= now < node.lends_until:
                until = hold_until(node.lends_until, node.spec.ends_at_ns)
                self._record_event(ev.AllocationEndAsked(now, name, until))
        self._asked_at.update(dict.fromkeys(known, now))
        self._asking = True
        jobs = dict.fromkeys(int(name.partition("+")[0]) for name in known)
        self._slurm.query(list(jobs), self._answered)

    def _known(self) -> dict[str, NodeEntry]:
        """Returns one node of each allocation whose end is known and set by Slurm: the node that is
        drained first.
        """
        found: dict[str, NodeEntry] = {}
        for node in self._ledger.held_nodes():
            spec, name = node.spec, node.spec.allocation
            if not spec.ends_at_ns or spec.end_by_user or not name.partition("+")[0].isdecimal():
                continue
            if name not in found or node.lends_until < found[name].lends_until:
                found[name] = node
        return found

    def _answered(self, answer: tuple[JobView, ...] | SlurmRejected | SlurmTransient) -> None:
        """Records the ends that Slurm reports. If Slurm does not answer, a drain that waits for the
        answer begins at its `hold_until`.
        """
        self._asking = False
        if not isinstance(answer, tuple):
            return
        rows = {(row.job, row.component): row for row in answer if row.holds and row.end_ns}
        for name, node in self._known().items():
            job, _, component = name.partition("+")
            row = rows.get((int(job), int(component or -1))) or rows.get((int(job), 0))
            if row is None or (component and row.component != int(component)):
                continue
            ends_at = node.spec.ends_at_ns
            moved = abs(row.end_ns - ends_at) > _SAME_NS
            if moved or node.drain_at > node.lends_until:
                self._record_event(ev.AllocationEndTold(self._now(), name,
                                                        row.end_ns if moved else ends_at))
