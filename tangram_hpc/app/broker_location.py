"""Where a job's broker is: the addresses at which it listens, and the access file that names them.

Nothing here needs a client, so that a broker and a worker start without loading one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import AccessError, BrokerUnreachable
from ..slurm.job_environment import other_nodes, slurm_place
from ..storage.access import NAME as ACCESS
from ..storage.access import Access, read_access
from ..storage.rundir import job_dir, tangram_home
from ..transport.socket.address import Addresses, addresses, rank_address


def own_addresses(bind: str, environ: Mapping[str, str], needed: bool = False
                  ) -> Addresses | None:
    """Returns where a broker listens on this host and which address it gives to others; None if it
    does not listen on TCP at all.

    Args:
        bind: the setting `bind`; "none" stands for no TCP.
        environ: the broker's environment.
        needed: whether nodes of other jobs will connect.

    Raises:
        InvalidInput: no address is known that the job's other nodes can reach; the message names
            `bind` and the remedy.
    """
    if bind == "none":
        return None
    return addresses(bind, other_nodes(environ), _names(environ), slurm_place(environ) is not None,
                     needed)


def meeting_address(bind: str, environ: Mapping[str, str]) -> str:
    """Returns the address at which the other ranks of this step can reach this one.

    Raises:
        InvalidInput: no such address is known; the message names `bind` and the remedy.
    """
    return rank_address(bind, other_nodes(environ, step=True), _names(environ))


def _names(environ: Mapping[str, str]) -> tuple[str, ...]:
    place = slurm_place(environ)
    return (place.node,) if place is not None and place.node else ()


def find_access(environ: Mapping[str, str], job: str = "") -> Path:
    """Returns the path of the access file by which `connect` finds the broker. Its folder is the
    job's.

    Args:
        environ: the environment, such as os.environ.
        job: a job's id. If it is empty, TANGRAM_ACCESS counts, else TANGRAM_JOB, else the Slurm job
            that this process is in.

    Raises:
        AccessError: none of these is set.

    Example:
        folder = tangram_hpc.find_access(os.environ).parent
    """
    if job:
        return job_dir(environ, job) / ACCESS
    if environ.get("TANGRAM_ACCESS"):
        return Path(environ["TANGRAM_ACCESS"])
    place = slurm_place(environ)
    named = environ.get("TANGRAM_JOB") or (place.job if place is not None else "")
    if named:
        return job_dir(environ, named) / ACCESS
    raise AccessError("no way to a broker: set TANGRAM_ACCESS to an access file or TANGRAM_JOB to "
                      f"a job below {tangram_home(environ)}, or start one with LocalCluster")


def await_access(path: Path, timeout_s: float, alive: Callable[[], bool] = lambda: True,
                 pid: int = 0) -> Access:
    """Returns the content of the access file as soon as it is there.

    Args:
        path: the access file.
        timeout_s: how long to wait, in seconds.
        alive: says whether the broker may still write the file.
        pid: pid of the broker on this host that must have written the file, because an earlier
            broker may have left a file of its own; 0: any broker.

    Raises:
        BrokerUnreachable: the file did not appear in time, or `alive` says that it never will.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if _is_there(path):
            with suppress(*((AccessError,) if pid else ())):
                found = read_access(path)
                if not pid or (found.pid, found.host) == (pid, socket.gethostname()):
                    return found
        if not alive() or time.monotonic() > deadline:
            raise BrokerUnreachable(
                f"access file {path}: the broker did not write it within {timeout_s:.0f} s"
                + ("" if pid else "; if the broker runs on another node, set TANGRAM_HOME to a "
                   "folder on a file system that all nodes share"))
        time.sleep(0.005)


def _is_there(path: Path) -> bool:
    """Returns whether an attempt to read the file makes sense.

    That is so if the file exists, and if this user may not search its folder: the failed attempt
    then gives the reason.
    """
    try:  # `Path.exists` hides a closed folder from Python 3.14 on
        os.stat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
