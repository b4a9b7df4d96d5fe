"""Reads a job's events once and computes the figures of its report.

`ReportedJob` has the records of all actions, the row of the job as `tangram acct -X` prints it, and
what the witness saw. Figures of actions are those of `accounting/`: an ACT is the time from
submission to result, of actions that have one, by the broker's clock.

The parts of an ACT are the wait for units, the restore (bringing a service onto its GPUs), the run
on the node, and the rest: carrying the order and the result, and starting and ending a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..accounting.fields import job_id
from ..accounting.job_row import JobRow, fold_with_job
from ..accounting.record import ActionRecord, Fold
from ..accounting.starts import without_gaps
from ..domain import event as ev
from ..domain.states import ENDED, ActionState
from ..simulator.savings.run_witness import RunWitness
from ..simulator.savings.savings import Savings

HOUR = 3600 * 10**9
SECOND = 10**9
PARTS = ("wait", "restore", "run", "rest")


@dataclass
class ReportedJob:
    """All that a report is computed from.

    Attributes:
        folded: The records of the actions.
        row: The job, as `tangram acct -X` prints it.
        witness: Nodes, sessions, services and endpoints.
        savings: What the job would have needed otherwise; None if that was not computed.
        why_no_savings: Why it was not computed.
    """

    folded: Fold
    row: JobRow
    witness: RunWitness
    savings: Savings | None = None
    why_no_savings: str = ""
    ended: list[ActionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = [r for r in self.folded.records.values()
                      if r.state in ENDED and r.end_ns]

    @property
    def records(self) -> Iterable[ActionRecord]:
        """The records of all actions, in the order of submission."""
        return self.folded.records.values()

    @property
    def since_ns(self) -> int:
        """The beginning of the time that the report is about."""
        return self.row.start_ns

    @property
    def until_ns(self) -> int:
        """The end of that time: the job's end, or now."""
        return max(self.row.end_ns, self.row.start_ns + 1)


def gather(events: Iterable[ev.Event], served: bool, now_ns: int) -> ReportedJob:
    """Takes all events of a job.

    Args:
        events: The events, in order.
        served: Whether a broker serves the job now.
        now_ns: The present time.
    """
    witness = RunWitness()

    def seen() -> Iterator[ev.Event]:
        for event in without_gaps(events):
            witness.add(event)
            yield event

    folded, row = fold_with_job(seen(), served, now_ns)
    return ReportedJob(folded, row, witness)


# ---- figures ------------------------------------------------------------------------------------


def parts_ns(r: ActionRecord) -> tuple[int, int, int, int]:
    """The parts of an action's ACT, in the order of PARTS, in ns."""
    run = r.outcome.exec_ns if r.outcome is not None else 0
    restore = r.outcome.restore_ns if r.outcome is not None else 0
    wait = min(r.planned_ns, r.end_ns - r.submit_ns)
    return wait, restore, run, max(0, r.end_ns - r.submit_ns - wait - restore - run)


def core_spans(r: ActionRecord, until_ns: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Each size that the last attempt of an action had: since when, until when, and its CPUs.

    Args:
        r: The action.
        until_ns: The end of what has not ended.
    """
    ends = [*(at for at, _ in r.grants[1:]), r.end_ns or until_ns]
    for (at, cores), end in zip(r.grants, ends, strict=False):
        yield at, max(at, end), cores


def percentile(ordered: Sequence[int], share: float) -> int:
    """The value below which this share of the ordered values lies; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def headline(report: ReportedJob) -> dict[str, Any]:
    """The figures of the whole job, with the unit at the end of each name."""
    row, usage = report.row, report.folded.usage
    acts = sorted(r.end_ns - r.submit_ns for r in report.ended)
    gpu_held_ns = sum(len(stay.spec.gpus) * stay.held_ns(report.since_ns, report.until_ns)
                      for stay in report.witness.stays.values())
    states = Counter(r.state for r in report.records)
    return {
        "job": row.job, "user": row.user, "state": row.state, "reason": row.reason,
        "placer": report.folded.placer, "start_ns": row.start_ns, "end_ns": row.end_ns,
        "elapsed_s": (row.end_ns - row.start_ns) / SECOND, "nodes": len(row.nodes),
        "cpus": row.cpus, "gpus": row.gpus, "mem_mib": row.mem_mib,
        "actions": len(report.folded.records), "ended": len(acts),
        "states": {s.value: states[s] for s in ActionState if states[s]},
        "act_mean_s": sum(acts) / len(acts) / SECOND if acts else None,
        **{f"act_p{int(share * 100)}_s": percentile(acts, share) / SECOND if acts else None
           for share in (.50, .95, .99)},
        "cpu_held_core_h": row.held_ns / HOUR, "cpu_lent_core_h": usage.lent_ns / HOUR,
        "cpu_used_core_h": row.cpu_ns / HOUR, "gpu_held_gpu_h": gpu_held_ns / HOUR,
        "gpu_lent_gpu_h": sum(r.gpu_held_ns for r in report.records) / HOUR,
    }


def classes(report: ReportedJob) -> list[dict[str, Any]]:
    """The figures of each class of actions, the one that held most first."""
    groups: dict[str, list[ActionRecord]] = {}
    for r in report.ended:
        groups.setdefault(r.action.name, []).append(r)
    rows = [_group(name, records) for name, records in groups.items()]
    return sorted(rows, key=lambda row: (-row["gpu_h"], -row["cpu_core_h"], -row["act_mean_s"]))


def _group(name: str, records: list[ActionRecord]) -> dict[str, Any]:
    acts = sorted(r.end_ns - r.submit_ns for r in records)
    n = len(records)
    sums = [sum(column) for column in zip(*map(parts_ns, records), strict=True)]
    return {
        "name": name, "actions": n, "act_mean_s": sum(acts) / n / SECOND,
        "act_p95_s": percentile(acts, .95) / SECOND,
        **{f"{part}_mean_s": total / n / SECOND for part, total in zip(PARTS, sums, strict=True)},
        "cpu_core_h": sum(r.cpu_held_ns for r in records) / HOUR,
        "cpu_used_core_h": sum(r.outcome.cpu_ns for r in records if r.outcome) / HOUR,
        "gpu_h": sum(r.gpu_held_ns for r in records) / HOUR,
        "failed": sum(r.state is not ActionState.COMPLETED for r in records),
    }


def services(report: ReportedJob) -> list[dict[str, Any]]:
    """The calls of each service."""
    return [_callee(name, records) for name, records in _by_key(report, "service:").items()]


def endpoints(report: ReportedJob) -> list[dict[str, Any]]:
    """The calls of each endpoint."""
    told = []
    for name, records in _by_key(report, "endpoint:").items():
        row = _callee(name, records)
        for only_of_services in ("batches", "batch_mean", "restores", "restore_s", "gpu_h"):
            del row[only_of_services]
        cost = sum(r.outcome.cost_micro for r in records if r.outcome)
        told.append(row | {"refused": sum(bool(r.outcome and r.outcome.pushed) for r in records),
                           "cost_micro": cost})
    return told


def _by_key(report: ReportedJob, kind: str) -> dict[str, list[ActionRecord]]:
    groups: dict[str, list[ActionRecord]] = {}
    for r in report.ended:
        if r.action.key.startswith(kind):
            groups.setdefault(r.action.key.removeprefix(kind), []).append(r)
    return dict(sorted(groups.items()))


def _callee(name: str, records: list[ActionRecord]) -> dict[str, Any]:
    group = _group(name, records)
    batches = sum(1 / r.outcome.batch for r in records if r.outcome)
    restores = [r.outcome.restore_ns for r in records if r.outcome and r.outcome.restore_ns]
    return {
        "name": name, "calls": len(records), "failed": group["failed"],
        "act_mean_s": group["act_mean_s"], "act_p95_s": group["act_p95_s"],
        "wait_mean_s": group["wait_mean_s"], "run_mean_s": group["run_mean_s"],
        "batches": round(batches), "batch_mean": len(records) / batches if batches else 1.0,
        "restores": len(restores), "restore_s": sum(restores) / SECOND, "gpu_h": group["gpu_h"]}


def slowest(report: ReportedJob, count: int = 25) -> list[dict[str, Any]]:
    """The actions with the longest ACT."""
    chosen = sorted(report.ended, key=lambda r: r.submit_ns - r.end_ns)[:count]
    return [{
        "action": job_id(r), "name": r.action.name, "state": r.state.value,
        "node": r.node.name if r.node else "", "submit_s": (r.submit_ns - report.since_ns) / SECOND,
        "act_s": (r.end_ns - r.submit_ns) / SECOND,
        **{f"{part}_s": ns / SECOND for part, ns in zip(PARTS, parts_ns(r), strict=True)},
        "cpus": r.cpus, "gpus": len(r.gpus), "kind": r.action.kind.value,
        "reason": r.outcome.reason if r.outcome else ""} for r in chosen]

