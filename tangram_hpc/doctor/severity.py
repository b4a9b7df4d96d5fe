"""Lists the checks that must pass for the main job to run; no other module decides that.

The main job is an embedded run (`LocalCluster`) on a machine without Slurm, and a broker's job (as
the template `hetjob` starts it) where Slurm is. A failed check leads to exit status 1 only if its
name is listed here for the kind of place at which the doctor runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .check import FAIL, JOB, LOGIN, MACHINE, Check

_ANY = (MACHINE, LOGIN, JOB)
_SLURM = (LOGIN, JOB)

# check -> the places where its failure counts, and why the main job would not run after it
NEEDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "settings": (_ANY, "every part reads the settings when it starts"),
    "controller": (_SLURM, "a job is submitted to it, and its steps are made by it"),
    "commands": (_SLURM, "the batch script calls them"),
    "release": (_SLURM, "the worker's step must share its nodes with others"),
    "partitions": ((LOGIN,), "no node could start the job"),
    "clock": (_SLURM, "Slurm refuses credentials of another time"),
    "library": (_ANY, "mpi4py is installed, and a gateway or `tangram demo` would end with it"),
    "hello": (_ANY, "the gateway and its trainers must be one MPI world"),
    "sandboxes": (_ANY, "a worker does not start with a backend that does not work"),
    "cgroups": (_ANY, "a worker does not start with an enforcement that does not work"),
    "home": (_ANY, "the journal and the access file lie there"),
    "latency": (_ANY, "the journal is written there"),
    "scratch": (_ANY, "sockets and sandboxes lie there"),
    "unix socket": (_ANY, "clients on the broker's node reach the broker by it"),
    "tcp": ((JOB,), "workers on other nodes reach the broker by it"),
    "nodes": ((JOB,), "workers on those nodes would not reach the broker"),
    "embedded run": (_ANY, "it is the main job in small"),
}


def blockers(kind: str, checks: Sequence[Check]) -> list[str]:
    """Returns why the main job would not run, one line for each check; empty if it would run.

    Args:
        kind: Where the doctor runs: "machine", "login" or "job".
        checks: The findings.
    """
    lines = []
    for check in checks:
        kinds, why = NEEDS.get(check.name, ((), ""))
        if check.state == FAIL and kind in kinds:
            lines.append(f"{check.name}: {why}")
    return lines
