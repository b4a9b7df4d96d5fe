"""Whether MPI ranks find each other here, as a gateway and its trainers must.

Law: MPI never starts in this process. Inside a job two ranks are started by `srun`, beside what
runs there; without Slurm by `mpiexec`; on a login node nothing is.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ..errors import how_to_install
from ..slurm.job_environment import unsized, without_slurm
from .check import JOB, LOGIN, Finding, Item, Where, fail, ok, skip, warn
from .deadline import CommandOutput, run_command, run_step

HELLO = f"{__package__}.mpi_hello"
_HELLO_S = 50.0
_INSTALL = how_to_install("mpi")


def library(where: Where) -> Finding:
    """Which MPI mpi4py was built for, or finds."""
    if importlib.util.find_spec("mpi4py") is None:
        return warn("mpi4py is not installed: no gateway, no MPI trainers, no `tangram demo`; "
                    "clients use sockets", _INSTALL)
    name, why = _library(where)
    return ok(name) if name else fail(f"mpi4py finds no MPI: {why}",
                                      f"{_INSTALL}, or load the MPI it was built for")


def _library(where: Where) -> tuple[str, str]:
    told = run_command([sys.executable, "-m", HELLO, "library"], without_slurm(where.environ), 15.0)
    lines = _lines(told)
    return (str(lines[0]["library"]), "") if lines else ("", told.last)


def plugin_for(name: str) -> str:
    """How srun starts this MPI, by what its library says of itself."""
    return "pmix" if "Open MPI" in name else "cray_shasta" if "CRAY" in name else "pmi2"


def plugins(where: Where) -> Finding:
    """Whether srun has the way that this MPI needs."""
    if not where.slurm.conf:
        return skip("there is no Slurm that answers")
    told = run_command(["srun", "--mpi=list"], where.environ, 10.0)
    words = (told.out + told.err).replace(":", " ").split()
    there = sorted({w for w in words if w.startswith(("pmi", "cray")) or w in ("none", "openmpi")})
    if told.code or not there:
        return warn(f"srun --mpi=list: {told.last}", "run `srun --mpi=list`")
    name = _library(where)[0] if importlib.util.find_spec("mpi4py") else ""
    wanted = where.mpi or (plugin_for(name) if name else "")
    text = ", ".join(there)
    if not wanted:
        return ok(text)
    if wanted not in there:
        return warn(f"{text}; {wanted} is not there, and {name or 'you'} asked for it",
                    "MPICH goes by pmi2, Open MPI by pmix: install mpi4py with an MPI for which "
                    "there is a way")
    return ok(f"{text}; you asked for {wanted}" if where.mpi else
              f"{text}; --mpi={wanted} fits {name.split(',')[0]}")


def hello(where: Where) -> Finding:
    """Two ranks that meet."""
    if importlib.util.find_spec("mpi4py") is None:
        return skip("mpi4py is not installed")
    if where.kind == LOGIN:
        return skip("nothing is started from a login node; run `tangram doctor` inside a job")
    if where.kind == JOB and not where.slurm.conf:
        return skip("the controller does not answer, so no step can be made")
    if where.kind == JOB:
        name, _ = _library(where)
        return _judged(*_through_srun(where, where.mpi or plugin_for(name)))
    mpiexec = _mpiexec()
    if not mpiexec:
        return warn("there is no mpiexec: `tangram demo` cannot start its ranks", _INSTALL)
    told = run_command([mpiexec, "-n", "2", sys.executable, "-m", HELLO],
                       without_slurm(where.environ), _HELLO_S)
    return _judged(told, "mpiexec")


def _mpiexec() -> str:
    """The one beside our interpreter, else on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec") or ""


def _through_srun(where: Where, way: str) -> tuple[CommandOutput, str]:
    assert where.place is not None
    nodes = min(2, where.place.nodes[0])
    argv = ["--overlap", "--overcommit", "--ntasks=2", f"--nodes={nodes}", "--mem=0",
            "--cpus-per-task=1", "--gres=none", f"--mpi={way}", "--kill-on-bad-exit=1",
            "--input=none", sys.executable, "-m", HELLO]
    told = run_step(argv, unsized(where.environ), _HELLO_S)
    return told, f"srun --mpi={way} on {nodes} node" + "s" * (nodes > 1)


def _judged(told: CommandOutput, way: str) -> Finding:
    worlds = _lines(told)
    remedy = "`srun --mpi=list` names the ways there are; try one with `tangram doctor --mpi=WAY`"
    if way == "mpiexec":
        remedy = f"mpi4py and mpiexec must be of the same MPI: {_INSTALL}"
    if [world["size"] for world in worlds] == [1, 1]:
        return fail(f"{way} makes two worlds of one rank", remedy)
    if told.code or len(worlds) != 1 or worlds[0]["size"] != 2:
        return fail(f"{way}: the ranks do not meet: {told.last}", remedy)
    text = f"two ranks met through {way} in {worlds[0]['seconds']:.2f} s (start and end: " \
           f"{told.seconds:.1f} s)"
    if not worlds[0]["threads"]:
        return warn(f"{text}, without MPI_THREAD_MULTIPLE: clients use the broker's socket",
                    "unset MPI4PY_RC_THREAD_LEVEL, or install an MPI with threads")
    return ok(text)


def _lines(told: CommandOutput) -> list[dict[str, Any]]:
    """What the ranks said; a launcher's own words are passed over."""
    found = []
    for line in told.out.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


CHECKS = (
    Item("library", library, 20.0), Item("ways to start", plugins, 30.0),
    Item("hello", hello, 75.0, "a step or a rank hangs: look at `squeue -s` and end it"),
)
