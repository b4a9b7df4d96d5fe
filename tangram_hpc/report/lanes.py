"""The timeline: which class of action held each core and each GPU, and when.

It is a grid of units and bins of time, so its size does not grow with the number of actions. A cell
has the class of the action that held the unit longest in the bin. Where there are many units,
neighbours of one node share a row, and the longest of all of them counts. A window of time may be
chosen, which then has all the bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..accounting.record import ActionRecord
from .labels import LENGTH_MAX, apart
from .reported_job import SECOND, ReportedJob, attempts, core_spans

BINS, ROWS_MAX = 1500, 256
_SUFFIX_MAX = len(" cpu 9999-9999")  # what follows the name of a node in the name of a row
CLASSES_MAX = 11  # classes with a colour of their own; the others share one
OTHERS = "other classes"


@dataclass(frozen=True)
class Lanes:
    """Describes the grid of the timeline.

    Attributes:
        rows: The name of each row, such as "n0 cpu 4-7"; CPUs first.
        names: The classes that have a colour, OTHERS last if there are more.
        cells: For each row and bin 1 + the place of the class in `names`; 0 where nothing held the
            unit.
        since_s: When the first bin begins, from the job's beginning.
        bin_s: Length of a bin.
        units: How many neighbours share a row.
    """

    rows: list[str]
    names: list[str]
    cells: NDArray[np.uint8]
    since_s: float
    bin_s: float
    units: int


@dataclass(frozen=True)
class Window:
    """Bounds a part of the job's time, in seconds from its beginning."""

    since_s: float
    until_s: float


def class_names(report: ReportedJob) -> list[str]:
    """Returns the classes that get a colour, the class that held units longest first."""
    held: Counter[str] = Counter()
    for r in attempts(report):
        for units, ns in _holdings(r, report.until_ns):
            held[r.action.name] += len(units) * ns
    names = [name for name, _ in held.most_common(CLASSES_MAX)]
    return [*names, OTHERS] if len(held) > CLASSES_MAX else names


def _holdings(r: ActionRecord, until_ns: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields the units of each size that an attempt had, and for how long."""
    for at, end, cores in core_spans(r, until_ns):
        yield cores, end - at
    if r.gpus and r.start_ns:
        yield r.gpus, max(0, (r.end_ns or until_ns) - r.start_ns)


def lanes(report: ReportedJob, window: Window | None = None) -> Lanes:
    """Returns the grid of a job, or of a window of it."""
    until_s = (report.until_ns - report.since_ns) / SECOND
    shown = window or Window(0.0, until_s)
    rows, place, units = _rows(report)
    names = class_names(report)
    number = {name: n + 1 for n, name in enumerate(names)}
    grid = _Grid(len(rows), report.since_ns + round(shown.since_s * SECOND),
                 max(1, round((shown.until_s - shown.since_s) * SECOND)))
    for r in attempts(report):
        code = number.get(r.action.name, len(names))
        if r.node is None or not r.start_ns:
            continue
        end = r.end_ns or report.until_ns
        for at, until, cores in core_spans(r, report.until_ns):
            grid.fill({place[r.node.name, "cpu", core] for core in cores
                       if (r.node.name, "cpu", core) in place}, at, until, code)
        grid.fill({place[r.node.name, "gpu", gpu] for gpu in r.gpus
                   if (r.node.name, "gpu", gpu) in place}, r.start_ns, end, code)
    return Lanes(rows, names, grid.cells, shown.since_s, grid.bin_ns / SECOND, units)


def _rows(report: ReportedJob) -> tuple[list[str], dict[tuple[str, str, int], int], int]:
    """Returns the names of the rows, the row of each unit, and how many units share a row."""
    nodes = report.witness.nodes.values()
    shown = dict(zip(report.witness.nodes, apart(report.witness.nodes, LENGTH_MAX - _SUFFIX_MAX),
                     strict=True))
    total = sum(len(n.cores) + len(n.gpus) for n in nodes)
    units = max(1, -(-total // ROWS_MAX))
    rows: list[str] = []
    place: dict[tuple[str, str, int], int] = {}
    for kind in ("cpu", "gpu"):
        for node in nodes:
            mine = node.cores if kind == "cpu" else node.gpus
            for at in range(0, len(mine), units):
                group = mine[at:at + units]
                place |= {(node.name, kind, unit): len(rows) for unit in group}
                last = f"-{group[-1]}" if len(group) > 1 else ""
                rows.append(f"{shown[node.name]} {kind} {group[0]}{last}")
    return rows, place, units


class _Grid:
    """Holds the cells, and how long the action of each cell held its unit."""

    def __init__(self, rows: int, since_ns: int, span_ns: int) -> None:
        self.cells = np.zeros((rows, BINS), np.uint8)
        self._longest = np.zeros((rows, BINS))
        self._since_ns, self.bin_ns = since_ns, span_ns / BINS

    def fill(self, rows: set[int], since_ns: int, until_ns: int, code: int) -> None:
        """Enters an action that held the units of these rows for this time."""
        first = max(0.0, (since_ns - self._since_ns) / self.bin_ns)
        last = min(float(BINS), (until_ns - self._since_ns) / self.bin_ns)
        if last <= first:
            return
        begin, end = int(first), min(BINS, int(last) + 1)
        shares = np.ones(end - begin)
        shares[0] = min(last, begin + 1) - first
        if end - begin > 1:
            shares[-1] = last - (end - 1)
        for row in rows:
            better = shares > self._longest[row, begin:end]
            self._longest[row, begin:end][better] = shares[better]
            self.cells[row, begin:end][better] = code
