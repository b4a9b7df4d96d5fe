"""Hooks use the public API only, so that a user's own trainer can do what a hook of this package
does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangram_hpc
from tangram_hpc import errors, training

HOOKS = Path(tangram_hpc.__file__).parent / "hooks"
PUBLIC = {"tangram_hpc": {*tangram_hpc.__all__, "comm"}, "tangram_hpc.errors": set(vars(errors)),
          "tangram_hpc.training": set(training.__all__)}
PAGES = sorted(HOOKS.rglob("*.py"))


def reached(path: Path, text: str) -> Iterator[str]:
    """Everything of this package, outside of the hooks, that a file imports; and each private
    attribute of another object than its own. A method that overrides another one may call it."""
    here = ["tangram_hpc", *path.relative_to(HOOKS.parent).parts[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "tangram_hpc" and not module.startswith("tangram_hpc.hooks"):
                yield from (f"{module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (f"{alias.name}:" for alias in node.names
                        if alias.name.startswith("tangram_hpc."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tangram_hpc":
            yield f"tangram_hpc:{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and (
                not node.attr.endswith("__")
                and ast.unparse(node.value) not in ("self", "super()")):
            yield f"private:{node.attr}"


def hidden(path: Path, text: str) -> list[str]:
    """The imported names and attributes that are not public."""
    return [each for each in reached(path, text)
            if each.partition(":")[2] not in PUBLIC.get(each.partition(":")[0], ())]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(HOOKS).as_posix())
def test_a_hook_uses_public_names_alone(path: Path) -> None:
    assert hidden(path, path.read_text()) == []


@pytest.mark.parametrize("line", [
    "from ...libra.live.core import HybridCore", "from ... import client", "client._connection",
    "import tangram_hpc.client.client", "from tangram_hpc import Connection",
    "import tangram_hpc\ntangram_hpc.client"])
def test_a_private_name_is_found(line: str) -> None:
    assert hidden(HOOKS / "reference" / "reference_rank.py", line) != []


def test_each_public_name_exists_and_has_a_docstring() -> None:
    for name in tangram_hpc.__all__:
        assert name == "__version__" or (getattr(tangram_hpc, name).__doc__ or "").strip(), name
    for name in training.__all__:
        assert (getattr(training, name).__doc__ or "").strip(), name
