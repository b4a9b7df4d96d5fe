"""Puts a job's actions into bins of time, so that a page of bounded size shows any number of them.

The values of a bin are exact means over its time, not samples: of the actions that wait or run, and
of the CPUs and GPUs that are lent and held. The cost is O(actions log actions).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..accounting.roll_up import nearest_rank
from .reported_job import PARTS, SECOND, ReportedJob, attempt_spans, core_spans, parts_ns

BINS = 400
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class TimeSeries:
    """Holds mean values of equal bins of time. ACTs are NaN where no action ended.

    Attributes:
        seconds: The middle of each bin, from the job's beginning.
        bin_s: Length of a bin.
        waiting, running: Actions.
        cpus_lent, cpus_held, gpus_lent, gpus_held: CPUs and GPUs.
        gpus_most: The most GPUs that were lent at one instant.
        act_mean, act_p95: ACT of the actions that ended in the bin, in seconds.
    """

    seconds: FloatArray
    bin_s: float
    waiting: FloatArray
    running: FloatArray
    cpus_lent: FloatArray
    cpus_held: FloatArray
    gpus_lent: FloatArray
    gpus_held: FloatArray
    gpus_most: float
    act_mean: FloatArray
    act_p95: FloatArray


def mean_level(spans: Iterable[tuple[int, int, float]], edges: FloatArray) -> FloatArray:
    """Returns the mean over each bin of the sum of weights that are there.

    Args:
        spans: When each begins and ends, and its weight.
        edges: The ends of the bins, ascending; one more than there are bins.
    """
    rows = np.array([*spans], dtype=np.float64).reshape(-1, 3)

    def area(times: FloatArray, weights: FloatArray) -> FloatArray:
        """Returns the sum, at each edge, of weight x (edge - time) over all times before it."""
        order = np.argsort(times, kind="stable")
        times, weights = times[order], weights[order]
        there = np.searchsorted(times, edges)
        sums = np.concatenate([[0.0], np.cumsum(weights)])
        moments = np.concatenate([[0.0], np.cumsum(weights * times)])
        return np.asarray(sums[there] * edges - moments[there])

    total = area(rows[:, 0], rows[:, 2]) - area(rows[:, 1], rows[:, 2])
    return np.asarray(np.maximum(0.0, np.diff(total) / np.diff(edges)))


def peak(spans: Iterable[tuple[int, int, float]]) -> float:
    """Returns the largest sum of weights that are there at one instant. A span that ends makes room
    for a span that begins at the same time.
    """
    changes = sorted(change for begin, end, weight in spans if end > begin
                     for change in ((begin, weight), (end, -weight)))
    steps: dict[int, float] = {}
    for at, weight in changes:
        steps[at] = steps.get(at, 0.0) + weight
    return max(accumulate(steps.values()), default=0.0)


def time_series(report: ReportedJob, bins: int = BINS) -> TimeSeries:
    """Returns the series of a whole job."""
    zero, until = report.since_ns, report.until_ns
    edges = np.linspace(0, until - zero, bins + 1, dtype=np.float64)
    waits, runs, cpus, gpus = (list[tuple[int, int, float]]() for _ in range(4))
    for record in report.records:
        for r, since, start, end in attempt_spans(record, until):
            waits.append((since - zero, start - zero, 1))
            runs.append((start - zero, end - zero, 1))
            if r.gpus:
                batch = r.outcome.batch if r.outcome is not None else 1  # its calls share them
                gpus.append((start - zero, end - zero, len(r.gpus) / batch))
            cpus += [(at - zero, to - zero, len(cores)) for at, to, cores in core_spans(r, until)]
    stays = [(s.since_ns - zero, (s.until_ns or until) - zero, s.spec)
             for s in report.witness.stays.values()]
    mean, p95 = _acts(report, edges)
    return TimeSeries(
        (edges[:-1] + edges[1:]) / 2 / SECOND, float(edges[1]) / SECOND,
        mean_level(waits, edges), mean_level(runs, edges), mean_level(cpus, edges),
        mean_level([(a, b, len(spec.cores)) for a, b, spec in stays], edges),
        mean_level(gpus, edges),
        mean_level([(a, b, len(spec.gpus)) for a, b, spec in stays], edges), peak(gpus), mean, p95)


def _acts(report: ReportedJob, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns mean and 95th percentile of the ACTs in s, by the bin in which the action ended."""
    bins = len(edges) - 1
    mean, p95 = np.full(bins, np.nan), np.full(bins, np.nan)
    rows = np.array([(r.end_ns - report.since_ns, r.end_ns - r.submit_ns) for r in report.ended],
                    dtype=np.float64).reshape(-1, 2)
    place = np.clip(np.searchsorted(edges, rows[:, 0], side="left") - 1, 0, bins - 1)
    order = np.argsort(place, kind="stable")
    acts, starts = rows[order, 1] / SECOND, np.searchsorted(place[order], np.arange(bins + 1))
    for n in range(bins):
        if starts[n] < starts[n + 1]:
            mine = np.sort(acts[starts[n]:starts[n + 1]])
            mean[n], p95[n] = mine.mean(), mine[nearest_rank(len(mine), 95)]
    return mean, p95


def part_histograms(report: ReportedJob, bins: int = 48
                    ) -> tuple[FloatArray, list[NDArray[np.int64]]]:
    """Returns the edges of bins in seconds, each wider than the last by one factor, and for each
    part of the ACT how many actions have a part of this length. A part of less than the first edge
    counts in the first bin.
    """
    rows = np.array([parts_ns(r) for r in report.ended], dtype=np.float64)
    rows = rows.reshape(-1, len(PARTS)) / SECOND
    top = max(1.0, float(rows.max(initial=0.0)))
    edges = np.geomspace(1e-4, top * 1.001, bins + 1, dtype=np.float64)
    return edges, [np.histogram(np.clip(rows[:, n], edges[0], None), edges)[0]
                   for n in range(len(PARTS))]
