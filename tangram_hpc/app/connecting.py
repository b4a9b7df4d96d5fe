"""How a process finds and reaches its broker: the access file, the sockets, the MPI world's
gateway.

The access file names the broker's addresses and holds the key. A trainer's rank in an MPI world
goes through the gateway and falls back to the socket when the gateway is lost; everybody else uses
the socket.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..client.client import Client
from ..config.settings import load_config
from ..errors import AccessError, BrokerUnreachable
from ..ports import Dial
from ..slurm.job_environment import other_nodes, slurm_place
from ..storage.access import Access, read_access
from ..storage.rundir import job_dir, tangram_home
from ..storage.store import FolderStore
from ..transport.socket.address import Addresses, addresses, rank_address
from ..transport.socket.channel import SocketChannel
from ..transport.socket.dial import dial
from ..version import VERSION

_rank_pid = 0  # pid of this process once it has met its MPI world; a forked child differs


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
    """Returns the path of the access file: that of `job`, else `TANGRAM_ACCESS`, else that of
    `TANGRAM_JOB` or of the Slurm job that this process is in.

    Raises:
        AccessError: none of these is set.
    """
    if job:
        return job_dir(environ, job) / "access.json"
    if environ.get("TANGRAM_ACCESS"):
        return Path(environ["TANGRAM_ACCESS"])
    place = slurm_place(environ)
    named = environ.get("TANGRAM_JOB") or (place.job if place is not None else "")
    if named:
        return job_dir(environ, named) / "access.json"
    raise AccessError("no way to a broker: set TANGRAM_ACCESS to an access file or TANGRAM_JOB to "
                      f"a job below {tangram_home(environ)}, or start one with LocalCluster")


def socket_dial(access: Access) -> Dial:
    """Returns a function that opens a channel to the broker over its sockets."""
    return lambda: SocketChannel(dial(access.addresses, access.key, access.job))


def connect(access: str | Path | None = None, *, job: str = "", address: str = "",
            name: str = "") -> Client:
    """Connects to a job's broker.

    In an MPI world with a gateway rank (`TANGRAM_GATEWAY` is set), and without arguments other than
    `name`, the client uses the gateway. The call is then collective over the world, and
    `tangram_hpc.comm` is the trainers' own communicator. In every other case, and when the gateway
    is lost, it uses the broker's socket.

    Args:
        access: the access file; None for that of `job`, else `TANGRAM_ACCESS`, else that of
            `TANGRAM_JOB` or of the Slurm job that this process is in.
        job: the job's name, instead of `access`.
        address: the broker's address, `unix:PATH` or `tcp:HOST:PORT`; empty for the addresses in
            the access file.
        name: the client's name in `tangram info`; empty for "host:pid".

    Returns:
        The client. Close it, or use it as a context manager.

    Raises:
        AccessError: there is no access file, it must not be trusted, or its broker has gone.
        BrokerUnreachable: the broker does not answer.
        WrongWorld: the MPI world is not the one that was launched.

    Example:
        with tangram_hpc.connect() as client:
            client.submit("make test", cpus=4).result().check()
    """
    environ = os.environ
    in_world = environ.get("TANGRAM_GATEWAY") or _rank_pid == os.getpid()
    if access is None and not job and not address and in_world:
        return _connect_over_mpi(environ, name)
    path = Path(access) if access is not None else find_access(environ, job)
    known = read_access(path)
    if address:
        known = replace(known, addresses=(address,))
    try:
        at = f", address={address!r}" if address else ""
        return Client([socket_dial(known)], known.job, FolderStore, name,
                      again=f"tangram_hpc.connect({str(path.absolute())!r}{at})")
    except BrokerUnreachable as error:
        raise AccessError(f"access file {path}: {error}; the job has ended because its broker was "
                          "killed, or this host cannot reach it") from None


def _fallback(path: str) -> Dial:
    """Returns a function that opens a socket channel when the gateway is lost. The access file is
    read only then.
    """
    def again() -> SocketChannel:
        known = read_access(Path(path))
        return SocketChannel(dial(known.addresses, known.key, known.job))
    return again


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
            raise BrokerUnreachable(f"access file {path}: the broker did not write it within "
                                    f"{timeout_s:.0f} s")
        time.sleep(0.005)


def _is_there(path: Path) -> bool:
    """Returns whether an attempt to read the file makes sense.

    That is so if the file exists, and if this user may not search its folder: the failed attempt
    then gives the reason.
    """
    try:
        return path.exists()
    except PermissionError:
        return True


def _connect_over_mpi(environ: Mapping[str, str], name: str) -> Client:
    """Makes a client that uses the world's gateway, and the socket when the gateway is lost."""
    from ..transport.mpi import mpi
    from ..transport.mpi.rank_card import RankCard

    global _rank_pid
    world = mpi.meet(environ, RankCard("trainer", VERSION))
    _rank_pid = os.getpid()
    # processes that this rank starts are not ranks: in them `connect()` uses the broker's socket
    os.environ["TANGRAM_ACCESS"] = world.access
    os.environ.pop("TANGRAM_GATEWAY", None)
    dials = [_fallback(world.access)]
    if world.usable:
        spin_us = load_config(environ, say=world.rank == 0).gateway_spin_us
        dials.insert(0, lambda: world.dial(spin_us))
    elif world.rank == 0:
        print("tangram: MPI lacks MPI_THREAD_MULTIPLE: using the broker's socket", file=sys.stderr)
    client = Client(dials, world.job, FolderStore, name, world.rank, world.size,
                    again=f"tangram_hpc.connect({world.access!r})")
    mpi.leave_after(client)
    return client
