"""The results of a run: records in `tangram-records/1`, one line for each attempt, and metrics.

Invariant: records are written in the order of the workload, from the scheduler's events alone, so
the same run gives the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..accounting.roll_up import percentile
from ..atomic_file import replacing_output
from ..errors import InvalidInput
from .workload import WorkAction

FORMAT = "tangram-records/1"
_SECOND = 10**9


@dataclass(slots=True)
class Record:
    """One attempt of one action. Times are in ns from the beginning of the step."""

    order: tuple[int, int, int, int]  # place of the trajectory in the file, turn, index, attempt
    trajectory: str
    action: WorkAction
    submit: int
    start: int
    node: str
    grants: list[tuple[int, int, tuple[int, ...]]]  # since, units, cores
    gpus: tuple[int, ...] = ()
    restore: int = 0
    end: int = -1
    state: str = ""
    migrated: bool = False  # the first attempt in a new sandbox, after the old one was lost

    @property
    def resized(self) -> bool:
        """Whether its number of units changed, or is not one of the action's degrees."""
        return len(self.grants) > 1 or self.grants[0][1] not in self.action.degrees

    @property
    def spans(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Each grant with its end: since, end, units, cores."""
        ends = [*(since for since, _, _ in self.grants[1:]), self.end]
        return [(since, end, units, cores)
                for (since, units, cores), end in zip(self.grants, ends, strict=True)]

    @property
    def unit_ns(self) -> int:
        """The sum of units times time."""
        return sum(units * (end - since) for since, end, units, _ in self.spans)

    def line(self) -> dict[str, Any]:
        """The record as a line of the format."""
        _, turn, index, attempt = self.order
        told: dict[str, Any] = {
            "trajectory": self.trajectory, "turn": turn, "index": index, "attempt": attempt,
            "state": self.state, "submit_s": self.submit / _SECOND,
            "start_s": self.start / _SECOND, "end_s": self.end / _SECOND, "node": self.node,
            "units": max(units for _, units, _ in self.grants),
        }
        if self.resized:
            told["resized"] = True
            told["grants"] = [[at / _SECOND, units, list(ids)] for at, units, ids in self.grants]
        elif self.action.resource == "cpu":
            told["cpu_ids"] = list(self.grants[0][2])
        if self.migrated:
            told["migrated"] = True
        if self.gpus:
            told["gpu_ids"], told["restore_s"] = list(self.gpus), self.restore / _SECOND
        return told


@dataclass(slots=True)
class RunRecords:
    """All results of a run. `head` is the first line of its records."""

    head: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    step_ns: int = 0

    def write(self, path: Path) -> None:
        """Writes the records.

        Raises:
            InvalidInput: The file cannot be written.
        """
        lines = [self.head, *(r.line() for r in self.records)]
        try:
            with replacing_output(path) as target:
                target.write_text("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise InvalidInput(f"--records {path}: {error.strerror}") from None

    def figures(self) -> dict[str, Any]:
        """The metrics of the run, in seconds and unit-seconds. Percentiles are by nearest rank, as
        in `tangram acct --by` and `tangram report`.
        """
        done = [r for r in self.records if r.state == "COMPLETED"]
        act = sorted(r.end - r.submit for r in done)
        n = len(act)

        def act_s(percent: int) -> float | None:
            return percentile(act, percent) / _SECOND if act else None

        def mean(values: list[int]) -> float:
            return sum(values) / max(1, n) / _SECOND

        def of(kind: str) -> list[Record]:
            return [r for r in self.records if r.action.resource.startswith(kind)]

        return {
            "actions": n, "mean_act_s": mean(act), "p50_act_s": act_s(50), "p95_act_s": act_s(95),
            "p99_act_s": act_s(99), "mean_queue_s": mean([r.start - r.submit for r in done]),
            "mean_exec_s": mean([r.end - r.start for r in done]),
            "step_s": self.step_ns / _SECOND,
            "cpu_unit_s": sum(r.unit_ns for r in of("cpu")) / _SECOND,
            "gpu_unit_s": sum(r.unit_ns for r in of("service:")) / _SECOND,
            "resizes": sum(len(r.grants) - 1 for r in self.records),
            "restores": sum(1 for r in self.records if r.restore),
        }
