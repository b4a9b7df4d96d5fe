"""Costs that another program computes: a JSON query on its stdin, the answer on its stdout.

The format is `tangram-costs/1`. The query has `format`, `kind`, `model`, `hardware` and either

  kind `train`: `training`, `lengths` (tokens of each sequence), `layouts` (tables of tp, ep, pp,
  dp, micro);
  kind `rollout`: `rollout`, `degree`, `requests` ([prompt, generated, tool_s], short ones first),
  `segments` ([first, end]: requests first .. end - 1).

The answer has `seconds`, one for each layout or segment, null for one that cannot run. For `train`
it may have `mem_bytes` (of the fullest GPU) in the same order.

A program that fails, is late or gives an unusable answer is one clear error; no other costs are
used in its place. All else comes from the analytic model: structure, TP share, batches that mix,
and memory where the program gives none. Learned factors apply to its times as well.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...errors import TangramError
from ..planner.costs import AnalyticCosts, matrix_of
from ..planner.lengths import Ints, Strata
from ..planner.shapes import NEVER, SECOND, Layout, Prices

FORMAT = "tangram-costs/1"
_SAID_MAX = 64 << 20  # bytes that are read of a program, which may print without end
_TAIL = 4096  # bytes of stderr that are kept


class CostsFailed(TangramError):
    """Raised when the cost program gives no usable answer."""


class CommandCosts:
    """Costs by a command: one call for all layouts, one for each rollout degree.

    Args:
        own: The analytic model, for all costs that the command does not compute.
        command: The program and its arguments.
        timeout_s: How long it may take to answer.
    """

    def __init__(self, own: AnalyticCosts, command: Sequence[str], timeout_s: float) -> None:
        self._own, self._command, self._timeout_s = own, list(command), timeout_s
        self.model, self.hardware = own.model, own.hardware
        self.training, self.rollout, self.batch = own.training, own.rollout, own.batch
        self._segments: dict[tuple[int, int], Ints] = {}

    def tp_share(self, tp: int) -> float:
        """The communication share of tensor parallelism, from the analytic model."""
        return self._own.tp_share(tp)

    def strata(self, most: int) -> Strata:
        """See `Costs`."""
        return self._own.strata(most)

    def train(self, layouts: Sequence[Layout]) -> Prices:
        """See `Costs`; with an empty list the program is not called.

        Raises:
            CostsFailed: The program gave no usable answer.
        """
        if not layouts:
            return Prices((), ())
        told = self._ask({"kind": "train", "training": asdict(self.training),
                          "lengths": [r.total for r in self.batch],
                          "layouts": [asdict(x) for x in layouts]})
        times = self._times(told, len(layouts), self._own.factors.train)
        own = self._own.train(layouts)
        memory = told.get("mem_bytes") or own.mem_bytes
        if (not isinstance(memory, list) or len(memory) != len(layouts)
                or not all(_whole(m) for m in memory)):
            raise self._wrong("mem_bytes: one whole number for each layout")
        return Prices(times, memory)

    def segments(self, degree: int, strata: Strata) -> Ints:
        """See `Costs`.

        Raises:
            CostsFailed: The program gave no usable answer.
        """
        n = len(strata)
        if strata.generated.tolist() != [r.generated for r in self.batch]:
            raise self._wrong("it prices whole batches only; set `routing_loss` to 0")
        if (degree, n) not in self._segments:
            spans = [(j, i) for j in range(n) for i in range(j + 1, n + 1)]
            told = self._ask({
                "kind": "rollout", "rollout": asdict(self.rollout), "degree": degree,
                "requests": [[r.prompt, r.generated, r.tool_ns / SECOND] for r in self.batch],
                "segments": [[strata.begin(j), strata.begin(i)] for j, i in spans]})
            times = self._times(told, len(spans), self._own.factors.of(degree))
            self._segments[degree, n] = matrix_of(n, dict(zip(spans, times, strict=True)))
        return self._segments[degree, n]

    def flow(self, degree: int, strata: Strata, ahead: int, train_ns: int) -> Ints:
        """The analytic model's matrix: a program is not asked for batches that mix."""
        return self._own.flow(degree, strata, ahead, train_ns)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        whole = {"format": FORMAT, "model": asdict(self.model),
                 "hardware": asdict(self.hardware), **question}
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps(whole).encode())
                stdin.seek(0)
                program = subprocess.Popen(self._command, stdin=stdin, stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE)
        except OSError as error:
            raise self._wrong(f"it cannot be started ({error.strerror})") from None
        out, err = self._said(program)
        if program.returncode:
            last = (err.decode(errors="replace").strip().splitlines() or ["nothing on stderr"])[-1]
            raise self._wrong(f"exit status {program.returncode}: {last[:200]}")
        try:
            answer = json.loads(out)
        except UnicodeDecodeError:
            raise self._wrong("its answer is not text") from None
        except ValueError:
            raise self._wrong("its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise self._wrong("its answer is not a JSON object")
        return answer

    def _said(self, program: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Waits for the program's end; returns what it printed, and the end of its stderr."""
        assert program.stdout is not None and program.stderr is not None
        deadline, out, err, size = time.monotonic() + self._timeout_s, bytearray(), b"", 0
        with program, selectors.DefaultSelector() as pipes:
            try:
                pipes.register(program.stdout, selectors.EVENT_READ)
                pipes.register(program.stderr, selectors.EVENT_READ)
                while pipes.get_map():
                    left = deadline - time.monotonic()
                    ready = pipes.select(left) if left > 0 else []
                    if not ready or size > _SAID_MAX:
                        raise self._wrong(f"it prints more than {_SAID_MAX >> 20} MiB" if ready else
                                          f"no answer within {self._timeout_s:g} s")
                    for key, _ in ready:
                        data = os.read(key.fd, 1 << 16)
                        size += len(data)
                        if not data:
                            pipes.unregister(key.fileobj)
                        elif key.fileobj is program.stdout:
                            out += data
                        else:
                            err = (err + data)[-_TAIL:]
                program.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._wrong(f"no answer within {self._timeout_s:g} s") from None
            finally:
                program.kill()
        return bytes(out), err

    def _times(self, told: dict[str, Any], count: int, factor: float) -> list[int]:
        seconds = told.get("seconds")
        if not isinstance(seconds, list) or len(seconds) != count:
            raise self._wrong(f"seconds: must be a list of {count} numbers")
        if not all(s is None or _number(s) for s in seconds):
            raise self._wrong("seconds: each must be null or a number of 0 or more")
        return [NEVER if s is None else min(NEVER, round(min(s, NEVER) * factor * SECOND))
                for s in seconds]

    def _wrong(self, what: str) -> CostsFailed:
        return CostsFailed(f"cost command {self._command[0]}: {what}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (
        0 <= value < math.inf)  # an int may be larger than any float


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
