"""The trajectories that took longest, as bars: when each action waited and when it ran.

A trajectory is a session, or what the client called one; an action without either is not shown. The
number of trajectories and of bars is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..accounting.record import ActionRecord
from ..domain.ids import show
from ..simulator.savings.run_witness import group_by_trajectory
from .lanes import OTHERS
from .reported_job import ReportedJob, attempt_spans

TRAJECTORIES_MAX, ACTIONS_MAX = 20, 100  # of each trajectory, its first actions
WAIT = "waiting"


@dataclass(frozen=True)
class Bar:
    """Describes one bar: its row, its class, and its place in ns, counted from the first action of
    the trajectory.
    """

    row: int
    name: str
    from_ns: int
    long_ns: int


@dataclass
class Waterfall:
    """Holds the labels of the rows, and the bars."""

    labels: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)


def slowest_trajectories(report: ReportedJob, names: list[str]) -> Waterfall:
    """Returns the trajectories with the longest time from the first submission to the last result.

    Args:
        report: The job.
        names: Classes with a colour of their own; all others are OTHERS.
    """
    own = [r for r in report.ended if r.action.session or r.action.trajectory_name]
    groups = group_by_trajectory(own, report.witness)
    chosen = sorted(groups, key=lambda records: -_span_ns(records))[:TRAJECTORIES_MAX]
    found = Waterfall()
    for row, records in enumerate(chosen):
        found.labels.append(_label(records, row))
        zero = records[0].submit_ns
        for r in records[:ACTIONS_MAX]:
            name = r.action.name if r.action.name in names else OTHERS
            for _, since, start, end in attempt_spans(r, report.until_ns):
                if start > since:
                    found.bars.append(Bar(row, WAIT, since - zero, start - since))
                if end > start:
                    found.bars.append(Bar(row, name, start - zero, end - start))
    return found


def _span_ns(records: list[ActionRecord]) -> int:
    return max(r.end_ns for r in records) - records[0].submit_ns


def _label(records: list[ActionRecord], row: int) -> str:
    """Returns the name of a trajectory with its place, since names may be equal."""
    name = next((r.session_name or r.action.trajectory_name for r in records
                 if r.session_name or r.action.trajectory_name), show(records[0].action.session))
    return f"{row + 1}. {name}"
