"""Reads a job's events once and computes the figures of its report.

`ReportedJob` has the records of all actions, the row of the job as `tangram acct -X` prints it, and
what the witness saw. Figures of actions are those of `accounting/`: an ACT is the time from
submission to result, of actions that have one, by the broker's clock.

The parts of an ACT are the wait for units, the restore (bringing a service onto its GPUs), the
set-up on the node, the run there, and the return, as `accounting/act_parts` splits it. The figures
of classes and of slow actions also have `rest`, the sum of set-up and return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..accounting.act_parts import ActParts, act_parts
from ..accounting.fields import job_id
from ..accounting.held_usage import HeldUsage
from ..accounting.job_row import JobFold, JobRow
from ..accounting.record import ActionRecord, Fold
from ..accounting.roll_up import percentile
from ..accounting.starts import without_gaps
from ..domain import event as ev
from ..domain.action import Kind
from ..domain.states import ENDED, UNSUCCESSFUL, ActionState
from ..simulator.savings.run_witness import RunWitness
from ..simulator.savings.savings import Savings

HOUR = 3600 * 10**9
SECOND = 10**9
SLOWEST = 25  # actions that the page lists
PARTS = ("wait", "restore", "setup", "run", "return")


@dataclass
class ReportedJob:
    """Holds all that a report is computed from.

    Attributes:
        folded: The records of the actions.
        row: The job, as `tangram acct -X` prints it.
        allocations: What was held.
        witness: Nodes, sessions, services and endpoints.
        savings: What the job would have needed otherwise; None if that was not computed.
        why_no_savings: Why it was not computed.
        outputs: The end of what some actions wrote, by the actions' ids.
    """

    folded: Fold
    row: JobRow
    allocations: HeldUsage
    witness: RunWitness
    savings: Savings | None = None
    why_no_savings: str = ""
    outputs: dict[int, str] = field(default_factory=dict)
    ended: list[ActionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = [r for r in self.folded.records.values()
                      if r.state in ENDED and r.end_ns]

    @property
    def records(self) -> Iterable[ActionRecord]:
        """Returns the records of all actions, in the order of submission."""
        return self.folded.records.values()

    @cached_property
    def slowest(self) -> list[ActionRecord]:
        """Returns the actions with the longest ACT."""
        return sorted(self.ended, key=lambda r: r.submit_ns - r.end_ns)[:SLOWEST]

    @cached_property
    def classes(self) -> list[dict[str, Any]]:
        """Returns the figures of each class of actions, the class that held most first."""
        tried = _grouped(attempts(self), lambda r: r.action.name)
        rows = [_group(name, records, tried[name])
                for name, records in _grouped(self.ended, lambda r: r.action.name).items()]
        return sorted(rows, key=lambda row: (-row["gpu_h"], -row["cpu_core_h"], -row["act_mean_s"]))

    @property
    def since_ns(self) -> int:
        """Returns the beginning of the time that the report is about."""
        return self.row.start_ns

    @property
    def until_ns(self) -> int:
        """Returns the end of the time that the report is about: the job's end, or now."""
        return max(self.row.end_ns, self.row.start_ns + 1)


def gather(events: Iterable[ev.Event], served: bool, now_ns: int) -> ReportedJob:
    """Takes all events of a job.

    Args:
        events: The events, in order.
        served: Whether a broker serves the job now.
        now_ns: The present time.
    """
    witness, job = RunWitness(), JobFold()
    for event in without_gaps(events):
        witness.add(event)
        job.add(event)
    row = job.close(served, now_ns)
    return ReportedJob(job.records, row, job.allocations, witness)


# ---- figures ------------------------------------------------------------------------------------


def parts_ns(r: ActionRecord) -> ActParts:
    """Returns the parts of the ACT of an action that ended, in the order of PARTS, in ns."""
    return r.parts or act_parts(r.end_ns - r.submit_ns, r.planned_ns, 0, -1, 0)


def _seconds_of_parts(parts: Sequence[float], name: str) -> dict[str, float]:
    """Returns the parts by name in seconds, and the sum of set-up and return; `name` is such as
    `{}_s`.
    """
    told = {name.format(part): ns / SECOND for part, ns in zip(PARTS, parts, strict=True)}
    return told | {name.format("rest"): told[name.format("setup")] + told[name.format("return")]}


def unmeasured(report: ReportedJob) -> int:
    """Returns how many actions ran whose set-up nobody measured."""
    return sum(r.outcome is not None and r.outcome.setup_ns < 0 < r.outcome.exec_ns
               for r in report.ended)


def core_spans(r: ActionRecord, until_ns: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yields each size that one attempt had: since when, until when, and its CPUs.

    Args:
        r: The attempt; `ActionRecord.attempts` has all attempts of an action.
        until_ns: The end of an attempt that has not ended.
    """
    ends = [*(at for at, _ in r.grants[1:]), r.end_ns or until_ns]
    for (at, cores), end in zip(r.grants, ends, strict=False):
        yield at, max(at, end), cores


def attempt_spans(r: ActionRecord, until_ns: int) -> Iterator[tuple[ActionRecord, int, int, int]]:
    """Yields each attempt of an action: the attempt, since when the action waited for it, when it
    began, and when it ended.

    Args:
        r: The action.
        until_ns: The end of an attempt that has not ended.
    """
    since = r.submit_ns
    for attempt in r.attempts:
        end = attempt.end_ns or until_ns
        yield attempt, since, max(since, attempt.start_ns or end), end
        since = end


def headline(report: ReportedJob) -> dict[str, Any]:
    """Returns the figures of the whole job, with the unit at the end of each name.

    What was held and lent ends where the elapsed time ends. Of a running job this is now, while
    `tangram acct -X` and `--held` count until the last event, and the rows of actions count nothing
    before these have ended. The CPU time used is that of attempts that have ended.
    """
    row = report.row
    acts = sorted(r.end_ns - r.submit_ns for r in report.ended)
    cpus, gpus = report.allocations.present
    later_ns = row.end_ns - report.folded.last_ns
    cpu_held_ns = row.held_ns + cpus * later_ns
    gpu_held_ns = gpus * later_ns + sum(
        r.gpu_held_ns for r in report.allocations.rows.values())
    states = Counter(r.state for r in report.records)
    return {
        "job": row.job, "user": row.user, "state": row.state, "reason": row.reason,
        "placer": report.folded.placer, "start_ns": row.start_ns, "end_ns": row.end_ns,
        "elapsed_s": (row.end_ns - row.start_ns) / SECOND, "nodes": len(row.nodes),
        "cpus": row.cpus, "gpus": row.gpus, "mem_mib": row.mem_mib,
        "actions": len(report.folded.records), "ended": len(acts),
        "states": {s.value: states[s] for s in ActionState if states[s]},
        "act_mean_s": sum(acts) / len(acts) / SECOND if acts else None,
        **{f"act_p{percent}_s": percentile(acts, percent) / SECOND if acts else None
           for percent in (50, 95, 99)},
        "cpu_held_core_h": cpu_held_ns / HOUR, "cpu_lent_core_h": _cpu_lent_ns(report) / HOUR,
        "cpu_used_core_h": row.cpu_ns / HOUR, "gpu_held_gpu_h": gpu_held_ns / HOUR,
        "gpu_lent_gpu_h": _gpu_lent_ns(report) / HOUR,
    }


def _cpu_lent_ns(report: ReportedJob) -> int:
    """Returns the core-ns that were lent, those of actions that still run included."""
    cpus = sum(len(r.grants[-1][1]) for r in report.records if r.grants and not r.end_ns)
    return report.folded.usage.lent_ns + cpus * (report.row.end_ns - report.folded.last_ns)


def _gpu_lent_ns(report: ReportedJob) -> int:
    """Returns the GPU-ns that were lent. Actions that still run are included, but calls of services
    are not, since their result tells how many calls share the GPUs.
    """
    return sum(r.gpu_held_ns if r.end_ns or r.action.kind is Kind.CALL or not r.start_ns else
               len(r.gpus) * (report.until_ns - r.start_ns) for r in attempts(report))


def attempts(report: ReportedJob) -> Iterator[ActionRecord]:
    """Yields all attempts of all actions: units were lent to each of them."""
    for r in report.records:
        yield from r.attempts


def _grouped(records: Iterable[ActionRecord], key: Callable[[ActionRecord], str]
             ) -> dict[str, list[ActionRecord]]:
    groups: dict[str, list[ActionRecord]] = {}
    for r in records:
        groups.setdefault(key(r), []).append(r)
    return groups


def _group(name: str, records: list[ActionRecord], tried: list[ActionRecord]) -> dict[str, Any]:
    """Returns the figures of the actions that ended, and what all attempts held and used."""
    acts = sorted(r.end_ns - r.submit_ns for r in records)
    n = len(records)
    means = [sum(column) / n for column in zip(*map(parts_ns, records), strict=True)]
    return {
        "name": name, "actions": n, "act_mean_s": sum(acts) / n / SECOND,
        "act_p95_s": percentile(acts, 95) / SECOND,
        **_seconds_of_parts(means, "{}_mean_s"),
        "cpu_core_h": sum(r.cpu_held_ns for r in tried) / HOUR,
        "cpu_used_core_h": sum(r.outcome.cpu_ns for r in tried if r.outcome) / HOUR,
        "gpu_h": sum(r.gpu_held_ns for r in tried) / HOUR,
        "failed": sum(r.state in UNSUCCESSFUL for r in records),
    }


def services(report: ReportedJob) -> list[dict[str, Any]]:
    """Returns the figures of each service: its calls, batches and restores."""
    return [_callee(*group) for group in _by_key(report, "service:")]


def endpoints(report: ReportedJob) -> list[dict[str, Any]]:
    """Returns the figures of each endpoint: its calls, refusals and costs."""
    told = []
    for name, records, tried in _by_key(report, "endpoint:"):
        row = _callee(name, records, tried)
        for only_of_services in ("batches", "batch_mean", "restores", "restore_s", "gpu_h"):
            del row[only_of_services]
        cost = sum(r.outcome.cost_micro for r in tried if r.outcome)
        told.append(row | {"refused": sum(bool(r.outcome and r.outcome.pushed) for r in tried),
                           "cost_micro": cost})
    return told


def _by_key(report: ReportedJob, kind: str
            ) -> list[tuple[str, list[ActionRecord], list[ActionRecord]]]:
    """Returns each service or endpoint: its name, its calls that ended, and all attempts of calls
    that went to it.
    """
    tried = _grouped(attempts(report), lambda r: r.action.key)
    return [(key.removeprefix(kind), records, tried[key]) for key, records in sorted(
        _grouped(report.ended, lambda r: r.action.key).items()) if key.startswith(kind)]


def _callee(name: str, records: list[ActionRecord], tried: list[ActionRecord]) -> dict[str, Any]:
    group = _group(name, records, tried)
    outcomes = [r.outcome for r in tried if r.outcome]
    batches = sum(1 / outcome.batch for outcome in outcomes)
    restores = [outcome.restore_ns for outcome in outcomes if outcome.restore_ns]
    return {
        "name": name, "calls": len(records), "failed": group["failed"],
        "act_mean_s": group["act_mean_s"], "act_p95_s": group["act_p95_s"],
        "wait_mean_s": group["wait_mean_s"], "run_mean_s": group["run_mean_s"],
        "batches": round(batches), "batch_mean": len(outcomes) / batches if batches else 1.0,
        "restores": len(restores), "restore_s": sum(restores) / SECOND, "gpu_h": group["gpu_h"]}


def slowest(report: ReportedJob) -> list[dict[str, Any]]:
    """Returns the figures of the actions with the longest ACT."""
    return [{
        "action": job_id(r), "name": r.action.name, "state": r.state.value,
        "node": r.node.name if r.node else "", "submit_s": (r.submit_ns - report.since_ns) / SECOND,
        "act_s": (r.end_ns - r.submit_ns) / SECOND,
        **_seconds_of_parts(parts_ns(r), "{}_s"),
        "cpus": r.cpus, "gpus": len(r.gpus), "kind": r.action.kind.value,
        "reason": r.outcome.reason if r.outcome else ""} for r in report.slowest]

