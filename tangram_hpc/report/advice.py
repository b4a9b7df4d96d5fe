"""Says in words what the figures of a job mean, and what to ask for the next time.

A sentence is said only when its rule is met; each rule names its threshold here. A smaller
allocation is recommended only where a simulation of the same actions says that the mean ACT grows
by no more than the savings' bound, or, for GPUs, where some were never used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..domain.states import UNSUCCESSFUL
from ..simulator.savings.savings import (
    AS_RUN,
    GROWTH_MAX,
    JOBS,
    RECORDS_AGREE,
    SERVICES,
    SMALLER,
    STATIC,
)
from .reported_job import ReportedJob, headline
from .series import TimeSeries

POOL_IDLE = 0.5  # a pool that was lent for a smaller part of its time was idle
USED_LITTLE = 0.5  # actions that used a smaller part of their CPUs' time asked for too many
CLASS_COUNTS = 0.05  # a class matters that held at least this part of all lent CPU time
WAITED_LONG = 0.25  # of the mean ACT
POOL_FULL = 0.85
FAILED_OFTEN = 0.05  # of the actions that ended
IDLE_ENDS = 0.2  # of the job's time, before its first action and after its last one


def advice(report: ReportedJob, series: TimeSeries) -> list[str]:
    """Returns the sentences whose rules are met, the most useful first."""
    told = headline(report)
    if not report.ended:
        return ["No action has ended, so there is nothing to judge."]
    return [*_smaller(report, told), *_gpus(report, told, series), *_waits(report, told),
            *_used(report), *_failed(report), *_ends(report), *_saved(report)]


def _trusted(report: ReportedJob) -> bool:
    """Returns whether the simulation of the run as it was agrees with the records."""
    error = None if report.savings is None else report.savings.error()
    return error is not None and error <= RECORDS_AGREE


def _smaller(report: ReportedJob, told: dict[str, Any]) -> Iterator[str]:
    share = told["cpu_lent_core_h"] / max(1e-9, told["cpu_held_core_h"])
    if share >= POOL_IDLE or not told["cpus"]:
        return
    found = report.savings
    if found is not None and _trusted(report):
        for size in sorted(SMALLER):
            row, growth = found.row(f"{size:.0%}"), found.growth(f"{size:.0%}")
            if row is not None and growth is not None and growth <= GROWTH_MAX:
                gpus = f" and {row.gpus} GPUs" if row.gpus else ""
                yield (f"The CPUs were lent {share:.0%} of the time. The same actions on "
                       f"{size:.0%} of the allocation have a mean ACT that is "
                       f"{abs(growth):.0%} {'longer' if growth >= 0 else 'shorter'}: ask for "
                       f"{row.cpus} CPUs{gpus}.")
                return
        growth = found.growth(f"{max(SMALLER):.0%}")
        if growth is not None:  # above the bound; None where it was not or cannot be simulated
            yield (f"The CPUs were lent {share:.0%} of the time, but a smaller allocation would "
                   f"make actions wait: on {max(SMALLER):.0%} of it the mean ACT grows by more "
                   f"than {GROWTH_MAX:.0%}.")
            return
    yield (f"The CPUs were lent {share:.0%} of the time. `tangram size` says how many the actions "
           "need.")


def _gpus(report: ReportedJob, told: dict[str, Any], series: TimeSeries) -> Iterator[str]:
    if not told["gpu_held_gpu_h"]:
        return
    share = told["gpu_lent_gpu_h"] / told["gpu_held_gpu_h"]
    most = math.ceil(series.gpus_most - 1e-6)  # the calls of a batch count as parts of one
    if share < POOL_IDLE and most < told["gpus"]:
        ask = f"ask for {most} GPUs" if most else "ask for none"
        less = ("; services take turns then, and are restored more often"
                if len(report.witness.services) > most else "")
        yield (f"The GPUs were busy {share:.0%} of the time, and never more than {most} of "
               f"{told['gpus']} at once: {ask}{less}.")


def _waits(report: ReportedJob, told: dict[str, Any]) -> Iterator[str]:
    waited = sum(min(r.planned_ns, r.end_ns - r.submit_ns) for r in report.ended)
    part = waited / max(1, sum(r.end_ns - r.submit_ns for r in report.ended))
    share = told["cpu_lent_core_h"] / max(1e-9, told["cpu_held_core_h"])
    if part > WAITED_LONG and share > POOL_FULL:
        yield (f"Actions waited for {part:.0%} of their ACT, and the CPUs were lent {share:.0%} of "
               "the time: more CPUs would shorten the step.")


def _used(report: ReportedJob) -> Iterator[str]:
    """Names classes that cannot run on fewer CPUs and leave most of them idle."""
    fewest = dict[str, int]()
    for r in report.ended:
        if r.action.key == "cpu":
            fewest[r.action.name] = min(fewest.get(r.action.name, r.action.degrees[0]),
                                        r.action.degrees[0])
    lent = report.folded.usage.lent_ns / 3600e9
    for row in report.classes:
        held, used = row["cpu_core_h"], row["cpu_used_core_h"]
        if (fewest.get(row["name"], 1) > 1 and used and held > CLASS_COUNTS * lent
                and used < USED_LITTLE * held):
            yield (f"Actions {row['name']!r} used {used / held:.0%} of the CPU time that they "
                   f"held and ask for {fewest[row['name']]} CPUs at least: ask for fewer.")


def _failed(report: ReportedJob) -> Iterator[str]:
    bad = [r for r in report.ended if r.state in UNSUCCESSFUL]
    if len(bad) > FAILED_OFTEN * len(report.ended):
        states = sorted({r.state.value for r in bad})
        yield (f"{len(bad)} of {len(report.ended)} actions ended as {', '.join(states)}: see "
               f"`tangram acct -j {report.row.job} -s {','.join(states)} -o JobID,JobName,Reason`.")


def _ends(report: ReportedJob) -> Iterator[str]:
    first = min(r.submit_ns for r in report.ended) - report.since_ns
    after = report.until_ns - max(r.end_ns for r in report.ended)
    span = report.until_ns - report.since_ns
    if report.row.state != "RUNNING" and first + after > IDLE_ENDS * span:
        yield (f"Nothing ran for {(first + after) / span:.0%} of the job's time: "
               f"{first / 1e9:.0f} s before its first action and {after / 1e9:.0f} s after its "
               "last one.")


def _saved(report: ReportedJob) -> Iterator[str]:
    found = report.savings
    if found is None or not _trusted(report):
        return
    mine, static, jobs = (found.row(way) for way in (AS_RUN, STATIC, JOBS))
    if mine and static and mine.mean_act_s and static.mean_act_s and mine.step_s and static.step_s:
        yield (f"With one reservation for each trajectory on the same nodes the mean ACT would be "
               f"{static.mean_act_s:.2f} s instead of {mine.mean_act_s:.2f} s, and the work would "
               f"take {static.step_s:.0f} s instead of {mine.step_s:.0f} s.")
    own = found.row(SERVICES)
    only_calls = not any(r.action.gpus for r in report.ended)  # the row lacks GPUs of others
    if (only_calls and mine and own and mine.held_gpu_h and own.held_gpu_h
            and own.held_gpu_h > mine.held_gpu_h):
        yield (f"Each service on GPUs of its own would hold {own.gpus} GPUs instead of "
               f"{mine.gpus}, and {own.held_gpu_h:.2f} GPU-h instead of {mine.held_gpu_h:.2f}.")
    if mine and jobs and mine.held_core_h and jobs.held_core_h:
        yield (f"One job for each trajectory would need {jobs.cpus} CPUs at one time instead of "
               f"{mine.cpus}, and hold {jobs.held_core_h:.2f} core-h instead of "
               f"{mine.held_core_h:.2f}.")
