"""No public class and no module has the name of another one.

A reader of a name in a message, in a traceback or at a call must not have to ask which of several
things it is. Modules of parallel packages that do the same job may share a stem; they are listed
here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "tangram_hpc"

# Each set is one job in parallel packages. Nothing else may share a stem with a module of the set.
PARALLEL: tuple[set[str], ...] = (
    # the loops of three processes
    {"broker/driver", "gateway/driver", "worker/driver"},
    # what a command line starts, and the command line
    {"app/gateway", "cli/gateway"},
    {"app/worker", "cli/worker"},
    {"cli/helpers/ids", "domain/ids"},
    # values, what a person writes of them, and what a client does with them
    {"client/rollouts", "config/rollouts", "domain/rollouts"},
    {"client/session", "domain/session"},
    # the doctor's check of what the other one does
    {"doctor/isolation", "domain/isolation"},
    {"doctor/mpi", "transport/mpi/mpi"},
    {"doctor/slurm", "domain/slurm"},
    # the paths until this release, importable for one more
    *({f"hooks/reference_{stem}", f"hooks/reference/reference_{stem}"}
      for stem in ("planning", "rank", "run", "task")),
)


def modules() -> dict[str, Path]:
    """Every module by its path without a suffix."""
    return {path.relative_to(ROOT).with_suffix("").as_posix(): path
            for path in sorted(ROOT.rglob("*.py")) if not path.stem.startswith("__")}


def defined(tree: ast.Module) -> set[str]:
    """Public classes of a module, and its aliases of types."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    names |= {target.id for node in tree.body if isinstance(node, ast.Assign)
              for target in node.targets if isinstance(target, ast.Name)
              and re.search("^[A-Z].*[a-z]", target.id)}
    return {name for name in names if not name.startswith("_")}


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for where, path in modules().items():
        for name in defined(ast.parse(path.read_text())):
            places[name].append(where)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_modules_have_one_stem() -> None:
    places = defaultdict(set)
    for where in modules():
        places[where.rpartition("/")[2]].add(where)
    twice = [found for found in places.values() if len(found) > 1]
    assert [sorted(found) for found in twice if found not in PARALLEL] == []
    assert [sorted(found) for found in PARALLEL if found not in twice] == [], "take it off PARALLEL"
