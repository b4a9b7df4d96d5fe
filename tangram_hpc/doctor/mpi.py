"""Checks whether MPI ranks find each other here, as a gateway and its trainers must.

MPI is never started in this process. Inside a job `srun` starts two ranks beside the other job
steps; without Slurm `mpiexec` starts them; from a login node nothing is started.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from ..errors import MissingExtra, how_to_install
from ..slurm.job_environment import unsized, without_slurm
from ..start_module import module_command
from ..transport.mpi.launcher import mpiexec
from .check import JOB, LOGIN, CheckContext, CheckSpec, Finding, fail, ok, skip, warn
from .deadline import CommandOutput, run_command, run_step

HELLO = f"{__package__}.mpi_hello"
_HELLO_S = 50.0
_INSTALL = how_to_install("mpi")


def library(context: CheckContext) -> Finding:
    """Reports the MPI library that mpi4py was built for, or that it finds."""
    if importlib.util.find_spec("mpi4py") is None:
        return warn("mpi4py is not installed: no gateway, no MPI trainers, no `tangram demo`; "
                    "clients use sockets", _INSTALL)
    name, why = _library(context)
    return ok(name) if name else fail(f"mpi4py finds no MPI: {why}",
                                      f"{_INSTALL}, or load the MPI it was built for")


def _library(context: CheckContext) -> tuple[str, str]:
    output = run_command(module_command(HELLO, "library"),
                         without_slurm(context.environ), 15.0)
    lines = _lines(output)
    return (str(lines[0]["library"]), "") if lines else ("", output.last)


def plugin_for(name: str) -> str:
    """Returns the `--mpi` option of srun that fits an MPI library, by the library's own name."""
    return "pmix" if "Open MPI" in name else "cray_shasta" if "CRAY" in name else "pmi2"


def plugins(context: CheckContext) -> Finding:
    """Checks whether srun has the plugin that this MPI library needs."""
    if not context.slurm.conf:
        return skip("there is no Slurm that answers")
    output = run_command(["srun", "--mpi=list"], context.environ, 10.0)
    words = (output.out + output.err).replace(":", " ").split()
    there = sorted({w for w in words if w.startswith(("pmi", "cray")) or w in ("none", "openmpi")})
    if output.code or not there:
        return warn(f"srun --mpi=list: {output.last}", "run `srun --mpi=list`")
    name = _library(context)[0] if importlib.util.find_spec("mpi4py") else ""
    wanted = context.mpi or (plugin_for(name) if name else "")
    text = ", ".join(there)
    if not wanted:
        return ok(text)
    if wanted not in there:
        return warn(f"{text}; {wanted} is missing, and {name or 'you'} asked for it",
                    "MPICH and Intel MPI use pmi2, Open MPI uses pmix: install mpi4py with an "
                    "MPI that srun can start")
    return ok(f"{text}; you asked for {wanted}" if context.mpi else
              f"{text}; --mpi={wanted} fits {name.split(',')[0]}")


def hello(context: CheckContext) -> Finding:
    """Starts two ranks and checks that they meet in one world."""
    if importlib.util.find_spec("mpi4py") is None:
        return skip("mpi4py is not installed")
    if context.kind == LOGIN:
        return skip("nothing is started from a login node; run `tangram doctor` inside a job")
    if context.kind == JOB and not context.slurm.conf:
        return skip("the controller does not answer, so no step can be made")
    if context.kind == JOB:
        name, _ = _library(context)
        return _finding(*_through_srun(context, context.mpi or plugin_for(name)))
    try:
        launcher = mpiexec()
    except MissingExtra:
        return warn("there is no mpiexec: `tangram demo` cannot start its ranks", _INSTALL)
    output = run_command([launcher, "-n", "2", *module_command(HELLO)],
                         without_slurm(context.environ), _HELLO_S)
    return _finding(output, "mpiexec")


def _through_srun(context: CheckContext, plugin: str) -> tuple[CommandOutput, str]:
    assert context.place is not None
    nodes = min(2, context.place.nodes[0])
    argv = ["--overlap", "--overcommit", "--ntasks=2", f"--nodes={nodes}", "--mem=0",
            "--cpus-per-task=1", "--gres=none", f"--mpi={plugin}", "--kill-on-bad-exit=1",
            "--input=none", *module_command(HELLO)]
    output = run_step(argv, unsized(context.environ), _HELLO_S)
    return output, f"srun --mpi={plugin} on {nodes} node" + "s" * (nodes > 1)


def _finding(output: CommandOutput, launcher: str) -> Finding:
    worlds = _lines(output)
    remedy = "`srun --mpi=list` lists what srun can start; try one with `tangram doctor --mpi=WAY`"
    if launcher == "mpiexec":
        remedy = f"mpi4py and mpiexec must be of the same MPI: {_INSTALL}"
    if [world["size"] for world in worlds] == [1, 1]:
        return fail(f"{launcher} makes two worlds of one rank", remedy)
    if output.code or len(worlds) != 1 or worlds[0]["size"] != 2:
        return fail(f"{launcher}: the ranks do not meet: {output.last}", remedy)
    text = f"two ranks met through {launcher} in {worlds[0]['seconds']:.2f} s (start and end: " \
           f"{output.seconds:.1f} s)"
    if not worlds[0]["threads"]:
        return warn(f"{text}, without MPI_THREAD_MULTIPLE: clients use the broker's socket",
                    "unset MPI4PY_RC_THREAD_LEVEL, or install an MPI with threads")
    return ok(text)


def _lines(output: CommandOutput) -> list[dict[str, Any]]:
    """Returns the JSON lines that the ranks printed; a launcher's own lines are ignored."""
    found = []
    for line in output.out.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


CHECKS = (
    CheckSpec("library", library, 20.0), CheckSpec("ways to start", plugins, 30.0),
    CheckSpec("hello", hello, 75.0, "a step or a rank hangs: look at `squeue -s` and end it"),
)
