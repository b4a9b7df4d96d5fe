"""Starts coverage.py in processes that get a clean environment; `make coverage` alone uses it.

A worker's fork server gets none of the variables by which coverage.py's own patch `subprocess`
reaches a child (`sandbox/environment.py` lists what passes), but it gets PYTHONPATH. What it forks
is counted with it, if it ends by itself and may write to this checkout: a sandbox behind Landlock
or in a mount namespace may not.
"""

import os
from pathlib import Path

import coverage

if "COVERAGE_PROCESS_CONFIG" not in os.environ:
    _REPO = Path(__file__).resolve().parents[2]
    os.environ["COVERAGE_PROCESS_START"] = str(_REPO / "pyproject.toml")
    os.environ["COVERAGE_FILE"] = str(_REPO / ".coverage")
    coverage.process_startup()
