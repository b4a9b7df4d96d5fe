"""docs/WALK.md is true: the files and names that it shows exist, and it visits each file once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ROOT = REPO / "tangram_hpc"
TEXT = (REPO / "docs" / "WALK.md").read_text()
# "**7. `a/file.py`** (`names`) and **`b/file.py`** (`names`). The text": number, head and text
_STOP = re.compile(r"^\*\*(\d+)\. ((?:.|\n)*?\))\. ((?:.|\n)*?)(?=\n\n|\Z)", re.MULTILINE)
_VISIT = re.compile(r"`([\w/]+\.py)`\*\*\s+\(([^)]*)\)")
STOPS = [(int(number), _VISIT.findall(head), f"{head} {text}")
         for number, head, text in _STOP.findall(TEXT)]


def code(text: str) -> list[str]:
    """Everything in backquotes, with line breaks as blanks."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


def defined(path: Path) -> set[str]:
    """Functions, classes with their methods (also as `Class.method`), and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {*methods, *(f"{node.name}.{method}" for method in methods)}
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                found.add(target.id)
    return found


def words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


def test_the_stops_are_numbered_in_order() -> None:
    assert [number for number, _, _ in STOPS] == list(range(1, TEXT.count("\n**") + 1))


@pytest.mark.parametrize(("number", "visits", "text"), STOPS, ids=[str(n) for n, _, _ in STOPS])
def test_every_stop_of_the_walk_names_files_and_names_that_exist(
        number: int, visits: list[tuple[str, str]], text: str) -> None:
    """The names beside a file are defined in it; every other name occurs in a file of the stop."""
    files = [name for name in code(text) if re.fullmatch(r"[\w/]+\.(py|c)", name)]
    assert visits and [name for name in files if not (ROOT / name).is_file()] == []
    missing = [f"{file}: {name}" for file, names in visits
               for name in code(names) if name not in defined(ROOT / file)]
    assert missing == [], "the name beside a file is defined in that file"
    known = set[str]().union(*(words(ROOT / name) for name in files))
    unknown = [name for name in code(text) if name not in files and not name.endswith("/")
               and not set(name.split(".")) <= known]
    assert unknown == [], "name the file in which it is"


def test_a_file_is_visited_once_in_each_direction() -> None:
    for part in TEXT.split("\n## Back"):
        files = [file for _, head, _ in _STOP.findall(part) for file, _ in _VISIT.findall(head)]
        assert len(files) == len(set(files)), "a file is visited twice in one direction"
