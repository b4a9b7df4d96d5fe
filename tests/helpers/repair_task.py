"""A task in the form of SWE-bench: a repository with a defect, a failing test that the agent
does not see, a gold patch, and an image in which all of it runs. The image is made of this
machine's own programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.root_folder_rig import PROGRAMS, make_image

_MORE = ("bash", "find", "git", "head", "python3", "sed", "tee", "uname")
_GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "safe.directory=*")
SOURCE = "def mean(numbers):\n    return sum(numbers) / (len(numbers) - 1)\n"
RIGHT = SOURCE.replace("(len(numbers) - 1)", "len(numbers)")
TESTS = """import unittest
import stats

class Mean(unittest.TestCase):
    def test_one(self):
        self.assertTrue(callable(stats.mean))
"""
HIDDEN = TESTS + """
    def test_three(self):
        self.assertEqual(stats.mean([1, 2, 6]), 3)
"""
FAIL_TO_PASS = "tests.Mean.test_three"
PASS_TO_PASS = "tests.Mean.test_one"


def repair_task(folder: Path) -> dict[str, Any]:
    """Makes the image with the repository in `/testbed`; returns the instance. Skips the test where
    this machine has no git or no Python of its system."""
    for path in ("/usr/bin/git", "/usr/bin/python3"):
        if not Path(path).exists():
            pytest.skip(f"needs {path} for the image of the task")
    root = make_image(folder / "root", (*PROGRAMS, *_MORE))
    library = Path("/usr/lib") / Path("/usr/bin/python3").resolve().name
    shutil.copytree(library, root / str(library).lstrip("/"), symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__", "test", "config-3*"))
    shutil.rmtree(root / "testbed")
    repository = root / "testbed"
    repository.mkdir()
    _git(repository, "init", "-q")
    patches = []
    for name, text in (("stats.py", SOURCE), ("tests.py", TESTS)):
        (repository / name).write_text(text)
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "-m", "begin")
    for name, text in (("stats.py", RIGHT), ("tests.py", HIDDEN)):
        (repository / name).write_text(text)
        patches.append(_git(repository, "diff"))
        _git(repository, "checkout", "-q", "--", name)
    return {"instance_id": "home__stats-1", "image_name": str(root),
            "problem_statement": "mean([1, 2, 6]) gives 4.5 instead of 3.",
            "base_commit": _git(repository, "rev-parse", "HEAD").strip(),
            "patch": patches[0], "test_patch": patches[1],
            "FAIL_TO_PASS": [FAIL_TO_PASS], "PASS_TO_PASS": [PASS_TO_PASS]}


def _git(folder: Path, *words: str) -> str:
    return subprocess.run([*_GIT, *words], cwd=folder, check=True, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(folder.parent)}).stdout
