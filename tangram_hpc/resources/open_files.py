"""The limit of open files (RLIMIT_NOFILE) of a process that serves many others.

A broker has a descriptor for each client, and a worker one for each sandbox. The usual soft limit
of 1,024, which Slurm takes over from the login node, is less than a large node needs, and a worker
that can open nothing any more ends with all of its sessions. So such a process raises its own soft
limit. Programs in sandboxes keep the limit with which the worker was started: a program that waits
by `select` takes descriptors up to 1,023 only, and some close all descriptors up to the limit.

Invariant: the hard limit is never changed.
"""

from __future__ import annotations

import resource
from contextlib import suppress

_MOST = 65536  # in some containers the hard limit is 10**9, and other children inherit this one
_SPARE_MAX = 256
_KIND = resource.RLIMIT_NOFILE

_as_started: tuple[int, int] | None = None  # before `allow_many`


def allow_many() -> None:
    """Raises the soft limit of this process to the hard limit, or to 65,536."""
    global _as_started
    soft, hard = resource.getrlimit(_KIND)
    _as_started = _as_started or (soft, hard)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(_KIND, (most, hard))


def limit_as_started(pid: int) -> None:
    """Gives a child process the limit with which this process was started."""
    if _as_started is not None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, _KIND, _as_started)


def is_spare(fd: int) -> bool:
    """Whether a new descriptor is in the last quarter of the limit, 256 at most, which a process
    that serves others needs for its own files and connections. The kernel gives the smallest number
    that is free.
    """
    soft = resource.getrlimit(_KIND)[0]
    return soft != resource.RLIM_INFINITY and fd >= soft - min(soft // 4, _SPARE_MAX)


def refusal() -> str:
    """Says why a worker cannot have another execution process, and what to do."""
    return (f"its worker may have {resource.getrlimit(_KIND)[0]} open files, and these are in use; "
            "close sessions, or start the worker with a higher hard limit (`ulimit -Hn`)")
