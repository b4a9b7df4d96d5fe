"""Who attacks what: the cells of the table of attacks, and how a run of pytest fills them.

An attack is a test with `@pytest.mark.attack(ATTACKER, *ASSETS)`; it may have several such marks.
Each of its cases counts once in each cell that it names. A case that passes has *held*: what it
tried was refused, or harmed nobody. A cell without an attempt is empty. `NO_WAY` says of some empty
cells why nothing can be tried there; the others are gaps, and a run lists them.

How many tests attack each cell is read from the tests' source, which takes no run: that is the
table of `docs/SECURITY.md`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

ATTACKERS = {
    "code": "code that a model wrote",
    "user": "another user of the node",
    "network": "somebody on the network",
    "repository": "a malicious repository or image",
    "session": "a session beside another one",
    "rank": "a rank that has gone wrong",
}
ASSETS = {
    "files": "the user's files",
    "keys": "keys and secrets",
    "sessions": "other sessions",
    "results": "results",
    "memory": "memory",
    "disk": "disk",
    "processes": "processes and threads",
    "cpu": "CPU",
    "network": "network",
    "settings": "settings",
    "terminal": "terminal",
    "broker": "the broker's life",
}
_OWN = "a rank runs as the user, whose files, processes and settings are its own"
_SHARED = "shared by all users of the node; Slurm divides it, not tangram"
_ISOLATED = "sessions reach it no more than any code does (row `code`)"
NO_WAY: dict[tuple[str, str], str] = {
    **{("rank", asset): _OWN for asset in ("files", "processes", "settings", "disk")},
    **{("session", asset): _ISOLATED for asset in ("files", "keys", "settings", "broker")},
    ("user", "terminal"): "nothing that another user names is printed",
    ("network", "processes"): "no process is started for a peer without a key",
    ("network", "cpu"): "a handshake costs CPU time; how many run at once is bounded",
    ("network", "settings"): "settings are read from files alone",
    ("repository", "sessions"): "its code runs in a session of its own (row `code`)",
    ("repository", "cpu"): "its code runs in a session of its own (row `code`)",
    ("repository", "network"): "its code runs in a session of its own (row `code`)",
    ("repository", "results"): "it is what is worked on: a test suite in it may say what it likes",
}
CELLS = len(ATTACKERS) * len(ASSETS)
Cell = tuple[str, str]


def cells_of(marks: Iterable[tuple[str, ...]]) -> list[Cell]:
    """Returns the cells that a test names by the arguments of its marks `attack`.

    Raises:
        ValueError: a mark names no attacker or asset that there is.
    """
    cells = []
    for attacker, *assets in marks:
        if attacker not in ATTACKERS or not assets or not set(assets) <= set(ASSETS):
            raise ValueError(f"attack {attacker!r}, {assets}: name one of {', '.join(ATTACKERS)}, "
                             f"then assets of {', '.join(ASSETS)}")
        cells += [(attacker, asset) for asset in assets]
    return cells


def files() -> list[Path]:
    """Returns the files of tests that have an attack."""
    return [path for path in sorted(TESTS.rglob("test_*.py")) if _marks(path)]


def _marks(path: Path) -> list[tuple[str, ...]]:
    """Returns the arguments of all marks `attack` of a file; a mark in a string is none."""
    text = path.read_text()
    if "pytest.mark.attack(" not in text:
        return []
    return [tuple(ast.literal_eval(arg) for arg in mark.args)
            for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)
            for mark in each.decorator_list
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.attack"]


def written() -> Counter[Cell]:
    """Returns how many tests attack each cell, as their source says."""
    found = Counter[Cell]()
    for path in files():
        found.update(cells_of(_marks(path)))
    return found


@dataclass
class Counts:
    """What came of the attempts, by cell.

    Attributes:
        held: cases that passed.
        broken: cases that failed.
        skipped: cases that could not be tried here.
        failed: the names of the cases that failed.
        reasons: why cases were skipped, and how many for each reason.
    """

    held: Counter[Cell] = field(default_factory=Counter)
    broken: Counter[Cell] = field(default_factory=Counter)
    skipped: Counter[Cell] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def tried(self, cell: Cell) -> int:
        """How many cases ran in a cell."""
        return self.held[cell] + self.broken[cell]

    def empty(self) -> list[Cell]:
        """The cells in which no case ran."""
        return [(attacker, asset) for attacker in ATTACKERS for asset in ASSETS
                if not self.tried((attacker, asset))]


class Counting:
    """A plugin of pytest that counts each case of an attack in its cells."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._cells: dict[str, list[Cell]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Notes the cells of each test."""
        for item in items:
            self._cells[item.nodeid] = cells_of(
                mark.args for mark in item.iter_markers("attack"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a case at its end; an error before or after the test counts as one that failed."""
        cells, counts = self._cells.get(report.nodeid, []), self.counts
        if report.failed:
            counts.broken.update(cells)
            counts.failed.append(report.nodeid)
        elif report.skipped:
            counts.skipped.update(cells)
            if isinstance(report.longrepr, tuple):
                counts.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            counts.held.update(cells)


def results(counts: Counts) -> str:
    """Returns the table of a run: how many cases held, and of how many."""
    def cell(at: Cell) -> str:
        if counts.tried(at):
            return f"{counts.held[at]} of {counts.tried(at)}"
        return "-" if at in NO_WAY else "not tried"

    return _table(cell)


def page() -> str:
    """Returns the table of the page: how many tests attack each cell."""
    tests = written()
    return _table(lambda at: str(tests[at]) if tests[at] else "-")


def _table(cell: Callable[[Cell], str]) -> str:
    """Returns a table with a row for each asset and a column for each attacker."""
    rows = ["| asset | " + " | ".join(ATTACKERS) + " |", "|---" * (len(ATTACKERS) + 1) + "|"]
    rows += [f"| {ASSETS[asset]} | " + " | ".join(cell((one, asset)) for one in ATTACKERS) + " |"
             for asset in ASSETS]
    return "\n".join(rows)
