"""The recipe for Spack asks for what pyproject.toml asks for. Spack is not needed: a
stand-in for its directives reads the recipes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
RECIPES = REPO / "slurm/packaging/spack_repo/tangram/packages"


def directives(recipe: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What a recipe calls, by directive: the positional and the named arguments of each call."""
    called: dict[str, list[Any]] = {}
    names = ("depends_on", "license", "variant", "version")
    package = ModuleType("spack.package")
    for name in names:
        def note(*args: Any, _of: str = name, **named: Any) -> None:
            called.setdefault(_of, []).append((args, named))
        setattr(package, name, note)
    python = ModuleType("spack_repo.builtin.build_systems.python")
    python.PythonPackage = type("PythonPackage", (), {})  # type: ignore[attr-defined]
    for module in (package, python):
        parts = module.__name__.split(".")
        for n in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(".".join(parts[:n])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    file = RECIPES / recipe / "package.py"
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": recipe, "__file__": str(file)})
    return called


def test_the_recipe_has_the_dependencies_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"],
              *project["project"]["optional-dependencies"]["mpi"][:1]]
    asked = {args[0]: named for args, named in directives("py_tangram_hpc", monkeypatch)[
        "depends_on"] if args[0].startswith("py-") and "run" in named["type"]}
    assert sorted(asked) == sorted(f"py-{name}@{low}:" for name, low in (
        re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in wanted))  # type: ignore
    assert asked["py-tomli@2.0:"]["when"] == "^python@:3.10"
    assert asked["py-mpi4py@4.0:"]["when"] == "+mpi"
    build = project["build-system"]["requires"]
    told = [args[0] for args, _ in directives("py_tangram_hpc", monkeypatch)["depends_on"]]
    assert {line.replace("setuptools>=", "py-setuptools@") + ":" for line in build} <= set(told)
    assert f"python@{project['project']['requires-python'].removeprefix('>=')}:" in told


def test_the_recipe_can_be_fetched_from_the_checkout_that_holds_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """`spack info` and `spack audit` refuse a version that Spack could fetch from nowhere."""
    (version, named), = directives("py_tangram_hpc", monkeypatch)["version"]
    assert version == ("develop",) and named == {"git": f"file://{REPO}"}


@pytest.mark.parametrize(("recipe", "at"), [("py_shtab", "1.7.2"), ("py_msgspec", "0.21.1")])
def test_the_recipe_of_a_dependency_names_a_version_with_its_hash(
        recipe: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((version,), named), = directives(recipe, monkeypatch)["version"]
    assert version == at and re.fullmatch(r"[0-9a-f]{64}", named["sha256"])
