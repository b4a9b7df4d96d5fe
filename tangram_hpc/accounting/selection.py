"""Says which rows of accounting a person asked for: by state, time, node, class and user. Pure.

A selection is applied to rows that were folded from a journal, and the books translate the same
selection into SQL. Both must choose the same rows, so the rules stand here once. Times choose as
sacct does: a row counts that had not ended at `since` and was submitted before `until`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .job_row import JobRow
from .record import ActionRecord

_ANY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Selection:
    """Which rows are wanted; an empty set or 0 means all.

    Attributes:
        states: states of actions, or of jobs.
        names: classes of actions; they do not apply to jobs.
        nodes: names of nodes on which a row ran.
        partitions: components of these nodes.
        users: login names of those who ran the job.
        accounts: Slurm accounts of the job.
        since: rows that had ended before this time are left out; ns since the epoch.
        until: rows that were submitted at this time or later are left out; ns since the epoch.
    """

    states: frozenset[str] = _ANY
    names: frozenset[str] = _ANY
    nodes: frozenset[str] = _ANY
    partitions: frozenset[str] = _ANY
    users: frozenset[str] = _ANY
    since: int = 0
    until: int = 0
    accounts: frozenset[str] = _ANY

    def wants(self, row: ActionRecord, job_end_ns: int) -> bool:
        """Returns whether an action is wanted.

        Args:
            row: the action, or one attempt of it.
            job_end_ns: when its job ended, or the present time while it runs. An action that its
                broker left open ended with the job.
        """
        on = row.node
        return ((not self.users or row.user in self.users)
                and (not self.accounts or row.account in self.accounts)
                and (not self.states or row.state.value in self.states)
                and (not self.names or row.action.name in self.names)
                and (not self.nodes or (on is not None and on.name in self.nodes))
                and (not self.partitions or (on is not None and on.component in self.partitions))
                and (row.end_ns or job_end_ns) >= self.since
                and (not self.until or row.submit_ns < self.until))

    def wants_job(self, row: JobRow) -> bool:
        """Returns whether a job is wanted."""
        return (self.may_hold(row.user, row.start_ns, row.end_ns)
                and (not self.accounts or row.account in self.accounts)
                and (not self.states or row.state in self.states)
                and (not self.nodes or bool(self.nodes & {*row.nodes}))
                and (not self.partitions or bool(self.partitions & {*row.partitions})))

    def may_hold(self, user: str, start_ns: int, end_ns: int) -> bool:
        """Returns whether a job may have rows that are wanted, by its user and times. Its account
        is the one of its last start, so the beginning of a journal does not tell it."""
        return ((not self.users or user in self.users) and end_ns >= self.since
                and (not self.until or start_ns < self.until))
