"""Measures whether something grows: samples along a run, and slopes over its second half.

Memory is measured in two ways. `blocks` counts the small objects that live in this process, as
Python's allocator knows them. The count is exact, so one forgotten object in 100 actions shows
after a few thousand of them. The resident memory shows what blocks do not, such as large tables and
memory of C libraries, and is noisy.
"""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
Sample = dict[str, float]


def resident(pid: int | str = "self") -> int:
    """Returns the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def folder_size(folder: Path) -> tuple[int, int]:
    """Returns how many bytes and files are in a folder."""
    sizes = [path.stat().st_size for path in folder.glob("*") if path.is_file()]
    return sum(sizes), len(sizes)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of the line that fits best through some points; 0 if there are fewer than
    two."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / max(1, n), sum(y for _, y in points) / max(1, n)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Growth:
    """The samples of one part of a run.

    Args:
        look: returns the figures that are sampled besides this process's memory.
        trace: whether to tell each sample on stderr, and at the end which lines of code allocated
            what is new since the half.
    """

    def __init__(self, look: Callable[[], Sample], trace: bool = False) -> None:
        self._look, self._trace = look, trace
        self._before: tracemalloc.Snapshot | None = None
        # by figure; in arrays, so that the samples themselves are no objects that are counted
        self._samples: dict[str, array[float]] = {}

    def sample(self, done: int) -> None:
        """Takes a sample after so many units of work."""
        gc.collect()
        found = {"done": done, "blocks": sys.getallocatedblocks(), "rss": resident(),
                 **self._look()}
        for what, value in found.items():
            self._samples.setdefault(what, array("d")).append(value)
        if self._trace:
            print(found, file=sys.stderr, flush=True)

    def half(self) -> None:
        """Notes that half of the work is done, for `trace`."""
        if self._trace:
            tracemalloc.start(8)
            self._before = tracemalloc.take_snapshot()

    def told(self) -> None:
        """Tells what is new since the half, if that is to be traced."""
        if self._before is not None:
            news = tracemalloc.take_snapshot().compare_to(self._before, "traceback")
            tracemalloc.stop()
            for one in news[:15]:
                print(f"{one.size_diff} B, {one.count_diff} objects", *one.traceback.format(),
                      sep="\n", file=sys.stderr)

    def second_half(self, what: str) -> float:
        """Returns the slope of a figure for one unit of work, over the second half."""
        half = len(self._samples["done"]) // 2
        return slope([*zip(self._samples["done"][half:], self._samples[what][half:], strict=True)])

    def peak(self, what: str) -> float:
        """Returns the largest value of a figure."""
        return max(self._samples[what])

    def last(self, what: str) -> float:
        """Returns the last value of a figure."""
        return self._samples[what][-1]
