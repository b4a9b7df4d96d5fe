"""Adds up actions by their class, trajectory, user, hour and so on: the rows of `acct --by`. Pure.

An action counts once, in the group of its last attempt. What its earlier attempts held and used
counts too, in their own groups, since cores were lent for them. Percentiles are exact, by nearest
rank: a group keeps 8 bytes for each of its actions and nothing else, so a million actions take 8
MB. All sums are Python's whole numbers; a database's would overflow at 2.5 million core-hours.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..domain.ids import show
from ..domain.states import ENDED, UNSUCCESSFUL
from .act_parts import ActParts, act_parts
from .fields import Field, duration
from .flat import GETTERS
from .record import ActionRecord

NONE = "-"  # the group of actions that have no session, service, ...
# what the group is made of: the columns of `flat`; `job` and `user` come with the job
_OF: dict[str, tuple[str, ...]] = {
    "name": ("name",), "trajectory": ("trajectory",), "session": ("session_name", "session"),
    "service": ("service",), "endpoint": ("endpoint",), "user": (), "tenant": ("tenant",),
    "hour": ("submit_ns",), "bucket": ("bucket",)}
BY = tuple(_OF)
_FIGURES = ("state", "submit_ns", "end_ns", "planned_ns", "restore_ns", "setup_ns", "exec_ns",
            "cpu_held_ns", "cpu_ns", "gpu_held_ns")
_OVER = frozenset(state.value for state in ENDED)
_FAILED = frozenset(state.value for state in UNSUCCESSFUL)
_HOUR = 3600 * 10**9
_QUARTER = _HOUR // 4  # every time zone changes its hour at a quarter


def columns_for(by: str) -> tuple[str, ...]:
    """Returns the names of the columns that `RollUp.add` takes, in its order."""
    return (*_FIGURES, *_OF[by])


def nearest_rank(count: int, percent: int) -> int:
    """Returns the place of a percentile among `count` ordered values, by nearest rank: the first
    value that at least this percentage of the values does not exceed.
    """
    return max(0, -(-count * percent // 100) - 1)


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Returns the percentile of the ordered values by nearest rank; 0 if there are none."""
    return ordered[nearest_rank(len(ordered), percent)] if ordered else 0


@dataclass(slots=True)
class RollUpRow:
    """The figures of one group.

    Attributes:
        group: what its actions have in common.
        actions: how many actions it has.
        attempts: how many attempts of actions, those that were sent back included.
        failed: actions that ended in a state of UNSUCCESSFUL.
        acts_ns: ACT of each action that ended: from its submission to its result.
        parts_ns: what these ACTs were spent on, in all: the parts of `ActParts`, in its order.
        cpu_held_ns: core-ns that were lent to all attempts.
        cpu_ns: CPU time that the processes of all attempts used.
        gpu_held_ns: GPU-ns that were lent to all attempts.
    """

    group: str
    actions: int = 0
    attempts: int = 0
    failed: int = 0
    acts_ns: array[int] = field(default_factory=lambda: array("q"))
    parts_ns: list[int] = field(default_factory=lambda: [0] * len(ActParts._fields))
    cpu_held_ns: int = 0
    cpu_ns: int = 0
    gpu_held_ns: int = 0

    def act_ns(self, percent: int) -> int:
        """Returns a percentile of the ACT; 0 if no action has ended. The ACTs must be sorted."""
        return percentile(self.acts_ns, percent)

    def act_mean_ns(self) -> int:
        """Returns the mean ACT in whole ns; 0 if no action has ended."""
        return sum(self.acts_ns) // max(1, len(self.acts_ns))

    def part_mean_ns(self, part: str) -> int:
        """Returns the mean of one part of the ACT in whole ns; 0 if no action has ended.

        Args:
            part: a field of `ActParts`.
        """
        return self.parts_ns[ActParts._fields.index(part)] // max(1, len(self.acts_ns))

    def to_json(self) -> dict[str, Any]:
        """Returns the row for machines: whole numbers, with the unit at the end of each name."""
        ended = len(self.acts_ns)
        return {"group": self.group, "actions": self.actions, "attempts": self.attempts,
                "ended": ended, "failed": self.failed,
                "act_mean_ns": self.act_mean_ns(),
                "act_p50_ns": self.act_ns(50), "act_p99_ns": self.act_ns(99),
                **{part.replace("_ns", "_mean_ns"): self.part_mean_ns(part)
                   for part in ActParts._fields},
                "cpu_held_ns": self.cpu_held_ns, "cpu_ns": self.cpu_ns,
                "gpu_held_ns": self.gpu_held_ns}


class RollUp:
    """Adds up actions by one of `BY`."""

    def __init__(self, by: str) -> None:
        self._groups: dict[str, RollUpRow] = {}
        self._by, self._hours = by, dict[int, str]()
        self._group = self._maker()

    def add(self, job: str, user: str, last: bool, values: Sequence[Any]) -> None:
        """Takes one attempt of an action.

        Args:
            job: the action's job.
            user: who ran the job.
            last: whether it is the action's last attempt.
            values: its columns, as `columns_for` names them.

        There are millions of attempts, so the usual case of `act_parts` is written out here.
        """
        (state, submit_ns, end_ns, planned_ns, restore_ns, setup_ns, exec_ns, cpu_held_ns, cpu_ns,
         gpu_ns, *key) = values
        group = self._group(job, user, key)
        row = self._groups.get(group)
        if row is None:
            row = self._groups[group] = RollUpRow(group)
        row.attempts += 1
        row.cpu_held_ns += cpu_held_ns
        row.cpu_ns += cpu_ns
        row.gpu_held_ns += gpu_ns
        if last:
            row.actions += 1
            row.failed += state in _FAILED
            if end_ns and state in _OVER:
                act_ns = end_ns - submit_ns
                row.acts_ns.append(act_ns)
                if setup_ns < 0:
                    setup_ns = 0
                sums = row.parts_ns
                return_ns = act_ns - planned_ns - restore_ns - setup_ns - exec_ns
                if return_ns < 0:
                    planned_ns, restore_ns, setup_ns, exec_ns, return_ns = act_parts(
                        act_ns, planned_ns, restore_ns, setup_ns, exec_ns)
                sums[0] += planned_ns
                sums[1] += restore_ns
                sums[2] += setup_ns
                sums[3] += exec_ns
                sums[4] += return_ns

    def add_attempt(self, r: ActionRecord) -> None:
        """Takes one attempt of an action."""
        self.add(r.job, r.user, r.last, [GETTERS[name](r) for name in columns_for(self._by)])

    def rows(self) -> list[RollUpRow]:
        """Returns the groups: hours and buckets in their order, others by the core-hours and
        GPU-hours that they held, the largest first.
        """
        found = list(self._groups.values())
        for row in found:
            row.acts_ns = array("q", sorted(row.acts_ns))
        if self._by == "hour":
            return sorted(found, key=lambda row: row.group)
        if self._by == "bucket":
            return sorted(found, key=lambda row: (len(row.group), row.group))
        return sorted(found, key=lambda row: (-row.cpu_held_ns, -row.gpu_held_ns, -row.actions,
                                              row.group))

    def _maker(self) -> Callable[[str, str, Sequence[Any]], str]:
        """Returns the function that makes the group from the columns of `_OF`."""
        if self._by == "user":
            return lambda job, user, key: user or NONE
        if self._by == "session":
            return lambda job, user, key: (
                key[0] or (f"{job}.{show(key[1])}" if key[1] else NONE))
        if self._by == "bucket":
            return lambda job, user, key: str(key[0]) if key[0] >= 0 else NONE
        if self._by == "hour":
            return lambda job, user, key: self._hour(key[0])
        return lambda job, user, key: key[0] or NONE

    def _hour(self, ns: int) -> str:
        """Returns the local hour of a time, such as `2026-11-26T14:00`."""
        quarter = ns // _QUARTER
        if quarter not in self._hours:
            at = datetime.fromtimestamp(quarter * _QUARTER // 10**9)
            self._hours[quarter] = at.strftime("%Y-%m-%dT%H:00")
        return self._hours[quarter]


def _hours_text(ns: int) -> str:
    return f"{ns / _HOUR:.3f}"


ROLL_UP_FIELDS = (
    Field("Group", 20, lambda r: r.group, "what the actions of the row have in common"),
    Field("Actions", 9, lambda r: str(r.actions), "how many actions"),
    Field("Attempts", 9, lambda r: str(r.attempts), "how many attempts of actions"),
    Field("Failed", 8, lambda r: str(r.failed),
          "actions that ended neither COMPLETED, CANCELLED nor PREEMPTED"),
    Field("ACTMean", 13, lambda r: duration(r.act_mean_ns()),
          "mean time from submission to result, of actions that ended"),
    Field("ACTP50", 13, lambda r: duration(r.act_ns(50)), "its median"),
    Field("ACTP99", 13, lambda r: duration(r.act_ns(99)), "its 99th percentile"),
    Field("Wait", 13, lambda r: duration(r.part_mean_ns("wait_ns")),
          "part of ACTMean: waiting for units"),
    Field("Restore", 13, lambda r: duration(r.part_mean_ns("restore_ns")),
          "part of ACTMean: bringing a service onto its GPUs"),
    Field("Setup", 13, lambda r: duration(r.part_mean_ns("setup_ns")),
          "part of ACTMean: from the order to the node until it ran"),
    Field("Run", 13, lambda r: duration(r.part_mean_ns("run_ns")),
          "part of ACTMean: run time on the node"),
    Field("Return", 13, lambda r: duration(r.part_mean_ns("return_ns")),
          "part of ACTMean: the rest, order and result under way"),
    Field("CoreHours", 11, lambda r: _hours_text(r.cpu_held_ns), "core-hours that were lent"),
    Field("CPUHours", 11, lambda r: _hours_text(r.cpu_ns), "CPU-hours that processes used"),
    Field("GPUHours", 11, lambda r: _hours_text(r.gpu_held_ns), "GPU-hours that were lent"),
)
ROLL_UP_DEFAULT = ("Group,Actions,Failed,ACTMean,ACTP50,ACTP99,Wait,Restore,Setup,Run,Return,"
                   "CoreHours,CPUHours,GPUHours")
