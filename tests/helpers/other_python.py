"""Interpreters and virtual environments for tests of frameworks that need other packages, or a
newer Python, than the tests themselves. Nothing of them is left in the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
CLIENT = ("msgspec", "numpy", "pydantic", "cloudpickle")  # what tangram_hpc itself imports
_NEWEST = 16


def find_python(at_least: tuple[int, int]) -> str:
    """Returns the interpreter of this machine with the lowest version that is at least this. Skips
    the test where there is none."""
    named = [shutil.which(f"python3.{minor}") for minor in range(at_least[1], _NEWEST)]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(str(path) for path in root.glob("versions/3.*/bin/python3"))
    found = {}
    for path in [*(name for name in named if name), *kept]:
        told = subprocess.run([path, "-c", "import sys, venv, ensurepip\n"
                                           "print(*sys.version_info[:2])"],
                              capture_output=True, text=True, check=False)
        if told.returncode == 0:
            major, minor = map(int, told.stdout.split())
            if (major, minor) >= at_least:
                found.setdefault((major, minor), path)
    if not found:
        pytest.skip(f"no Python {at_least[0]}.{at_least[1]} or later with venv is installed")
    return found[min(found)]


def make_venv(folder: Path, python: str, packages: Sequence[str],
              without_dependencies: Sequence[str] = ()) -> Path:
    """Makes a virtual environment with packages of the index; returns its folder of programs. Skips
    the test where they cannot be installed.

    Args:
        folder: the folder in which it is made.
        python: the interpreter.
        packages: packages that are installed with their dependencies, beside those that
            tangram_hpc's client needs.
        without_dependencies: packages that are installed first and without their dependencies, even
            if they ask for another interpreter.
    """
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q"]
    for words in ([*pip, "--no-deps", "--ignore-requires-python", *without_dependencies],
                  [*pip, *packages, *CLIENT]):
        if words[-1].startswith("-"):
            continue
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"{packages[:1] or without_dependencies[:1]} cannot be installed here: "
                        f"{made.stderr.strip()[-300:]}")
    return folder / "bin"


def copy_checkout(folder: Path) -> None:
    """Copies the source of this checkout into a new folder, in which pip may build."""
    shutil.copytree(CHECKOUT, folder, ignore=shutil.ignore_patterns(
        ".git", ".venv*", ".vm", "__pycache__", "build", "*.egg-info", ".*_cache"))


def client_env(access: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a program that uses this checkout as a client of a broker."""
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "TANGRAM_ACCESS": str(access),
            "PYTHONDONTWRITEBYTECODE": "1", **more}
