"""Runs code where one folder is a small file system of its own, which is soon full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SMALL = """mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@" """


def in_a_small_folder(folder: Path, size: str, code: str) -> str:
    """Runs Python code, whose first argument is `folder`, where `folder` is a file system of this
    size; returns what it prints."""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _SMALL.format(size=size),
         folder, sys.executable, "-c", code, folder],
        capture_output=True, text=True, cwd=_ROOT)
    if "unshare:" in done.stderr or "ermission denied" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert not done.stderr
    return done.stdout
