"""Plants each bug into a copy of the tree and looks for it; prints a table.

    python -m planted [--only TEXT] [--jobs 2]

It is run in the folder `tests`. The exit status is 1 if a bug was not found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from planted import REPO, PlantedBug, planted_bugs

_IGNORED = shutil.ignore_patterns("__pycache__", "*.so")
_FIRST_SEED = 500_000  # others than those that the swarm plays otherwise


def main() -> int:
    """Looks for all bugs, or for some."""
    p = argparse.ArgumentParser(prog="python -m planted", description=__doc__)
    p.add_argument("--only", default="", help="bugs whose name or area has this text")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--from", dest="first", type=int, default=0, help="leave out so many bugs")
    given = p.parse_args()
    bugs = [bug for bug in planted_bugs() if given.only in f"{bug.area}: {bug.name}"]
    bugs = bugs[given.first :]
    missed = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        looks = {pool.submit(_look_for, bug): bug for bug in bugs}
        for look in as_completed(looks):
            bug, (found, took_s) = looks[look], look.result()
            missed += not found
            print(f"{bug.area:<10} {bug.name:<68} {found or 'NOT FOUND':<60} {took_s:6.1f} s",
                  flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} bugs were found", flush=True)
    return int(missed > 0)


def _look_for(bug: PlantedBug) -> tuple[str, float]:
    """Returns what found a bug, or an empty text; and how long that took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        shutil.copytree(REPO / "tangram_hpc", tree / "tangram_hpc", ignore=_IGNORED)
        shutil.copytree(REPO / "tests", tree / "tests", ignore=_IGNORED)
        bug.plant(tree)
        found = _by_swarm(bug, tree) if bug.found_by == "swarm" else _by_test(bug, tree)
    return found, time.monotonic() - began


def _by_swarm(bug: PlantedBug, tree: Path) -> str:
    seeds = f"{_FIRST_SEED}:{_FIRST_SEED + bug.seeds}"
    ran = _run([sys.executable, "-m", "swarm", "--seeds", seeds, "--jobs", "1", "--until-failure"],
               tree)
    try:
        told = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"{bug.name}: the swarm did not run: {ran.stderr[-1500:]}") from None
    if not ran.returncode:
        return ""
    return f"{told['law'][:45]} (seed {told['seed'] - _FIRST_SEED + 1})"


def _by_test(bug: PlantedBug, tree: Path) -> str:
    shutil.copy(REPO / "pyproject.toml", tree)
    ran = _run([sys.executable, "-m", "pytest", "-q", "-x", f"tests/{bug.found_by}"], tree, tree)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"{bug.name}: the test did not run: {ran.stdout[-1500:]}")
    return bug.found_by if ran.returncode else ""


def _run(command: list[str], tree: Path, where: Path | None = None
         ) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}"}
    return subprocess.run(command, cwd=where or tree / "tests", env=environ, text=True,
                          capture_output=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
