"""Walks the package: all its modules, and all classes of a kind, wherever they stand."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from . import where


@functools.cache
def load_all() -> tuple[str, ...]:
    """Imports every module that can be imported here; returns the names of those."""
    package = importlib.import_module(where.PACKAGE)
    names = []
    for module in pkgutil.walk_packages(package.__path__, f"{where.PACKAGE}."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue  # an extra that is not installed, or the compiled loop, which is no module
        names.append(module.name)
    return tuple(sorted(names))


def classes(root: type) -> list[type]:
    """All classes of the package that derive from `root`, in a stable order."""
    load_all()
    found: dict[str, type] = {}

    def visit(parent: type) -> None:
        for child in parent.__subclasses__():
            if child.__module__.split(".")[0] == where.PACKAGE:
                found[f"{child.__module__}:{child.__qualname__}"] = child
            visit(child)
    visit(root)
    return [found[name] for name in sorted(found)]


def folder() -> Path:
    """The package's folder."""
    spec = importlib.util.find_spec(where.PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def file_of(module: str) -> Path | None:
    """The source of a module, which is not imported; None where there is none."""
    base = folder().joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Every source file of the package, parsed."""
    for path in sorted(folder().rglob("*.py")):
        yield path, ast.parse(path.read_text())
