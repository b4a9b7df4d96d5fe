"""Asks Slurm again when the allocations end whose nodes are lent.

A worker says the end of its allocation when it joins. `scontrol update TimeLimit` changes it later
without a word to the job. This part asks at the few times that `scheduler.policy.ending.next_look`
names (one request for all allocations, whatever their number) and hands on as events what Slurm
answers. It decides nothing: when a node is drained, and whether a drain is taken back, is the
scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..domain.slurm import JobView
from ..ports import Clock, Slurm, SlurmRejected, SlurmTransient
from ..scheduler.policy.ending import LOOK_AHEAD_NS, hold_until, next_look
from ..scheduler.state.ledger import Ledger, NodeEntry

_SAME_NS = 2 * 10**9  # Slurm rounds to seconds, and its releases do so differently


class Ends:
    """One broker's questions about ends.

    Args:
        gap_s: least time between two questions that the budget of Slurm calls allows.
    """

    def __init__(self, slurm: Slurm | None, ledger: Ledger, clock: Clock,
                 happen: Callable[[ev.Event], None], gap_s: float) -> None:
        self._slurm, self._ledger, self._now = slurm, ledger, clock.now_ns
        self._happen, self._gap_ns = happen, round(gap_s * 1e9)
        self._looked_at: dict[str, int] = {}  # by allocation, when Slurm was last asked
        self._asking = False

    def watch(self) -> None:
        """Called every few seconds; asks Slurm when a question is due. O(nodes)."""
        if self._slurm is None or self._asking:
            return
        now, known = self._now(), self._known()
        self._looked_at = {name: at for name, at in self._looked_at.items() if name in known}
        due = {}
        for name, node in known.items():
            looked_at = self._looked_at.setdefault(name, node.joined_at)
            ends_at = node.spec.ends_at_ns
            if next_look(looked_at, node.lends_until, ends_at, self._gap_ns) <= now:
                due[name] = node
        if not due:
            return
        for name, node in due.items():
            if node.lends_until - LOOK_AHEAD_NS <= now < node.lends_until:
                until = hold_until(node.lends_until, node.spec.ends_at_ns)
                self._happen(ev.AllocationEndAsked(now, name, until))
        self._looked_at.update(dict.fromkeys(known, now))
        self._asking = True
        jobs = dict.fromkeys(int(name.partition("+")[0]) for name in known)
        self._slurm.query(list(jobs), self._answered)

    def _known(self) -> dict[str, NodeEntry]:
        """A node of each allocation whose end is known and Slurm's to say; of several nodes the one
        that is drained first."""
        found: dict[str, NodeEntry] = {}
        for node in self._ledger.held_nodes():
            spec, name = node.spec, node.spec.allocation
            if not spec.ends_at_ns or spec.end_by_user or not name.partition("+")[0].isdecimal():
                continue
            if name not in found or node.lends_until < found[name].lends_until:
                found[name] = node
        return found

    def _answered(self, told: tuple[JobView, ...] | SlurmRejected | SlurmTransient) -> None:
        """Without an answer a drain that waits for one begins when its hold is over."""
        self._asking = False
        if not isinstance(told, tuple):
            return
        rows = {(row.job, row.component): row for row in told if row.holds and row.end_ns}
        for name, node in self._known().items():
            job, _, component = name.partition("+")
            row = rows.get((int(job), int(component or -1))) or rows.get((int(job), 0))
            if row is None or (component and row.component != int(component)):
                continue
            ends_at = node.spec.ends_at_ns
            moved = abs(row.end_ns - ends_at) > _SAME_NS
            if moved or node.drain_at > node.lends_until:
                self._happen(ev.AllocationEndTold(self._now(), name,
                                                  row.end_ns if moved else ends_at))
