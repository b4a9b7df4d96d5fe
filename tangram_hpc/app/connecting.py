"""How a process connects to its broker: over sockets, or over its MPI world's gateway.

The access file names the broker's addresses and holds the key. A broker that is started again
writes another file: with a new key, and mostly with other addresses. So each dial reads the file
anew, and a new client waits for a broker that is being started again.

A trainer's rank in an MPI world goes through the gateway and falls back to the socket when the
gateway is lost; everybody else uses the socket.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..client.client import Client
from ..client.request import check_text
from ..config.settings import load_config
from ..domain.tenant import TENANT_NAME, TENANT_NAME_SAID
from ..errors import AccessError, BrokerUnreachable, InvalidInput
from ..ports import Dial
from ..storage.store import FolderStore
from ..transport.socket.channel import SocketChannel
from ..version import VERSION
from .access_dial import AccessFileDialer, OutOfSight
from .broker_location import find_access
from .direct_transport import direct_transport
from .lost_broker import report_loss_in_one_line

_rank_pid = 0  # pid of this process once it has met its MPI world; a forked child differs


def socket_dial(dialer: AccessFileDialer, job: str) -> Dial:
    """Returns a function that opens a channel to the broker of this job over its sockets.

    A client that has had a channel gets BrokerUnreachable for every reason: for it, the broker that
    it had is gone.
    """
    reached = False

    def open_channel() -> SocketChannel:
        nonlocal reached
        try:
            connection = dialer.dial()
        except AccessError as error:
            if not reached:
                raise
            raise BrokerUnreachable(f"job {job}: {error}") from None
        reached = True
        return SocketChannel(connection.sock, connection.encryption)
    return open_channel


def connect(access: str | Path | None = None, *, job: str = "", address: str = "",
            name: str = "", tenant: str = "") -> Client:
    """Connects to a job's broker.

    In an MPI world with a gateway rank (`TANGRAM_GATEWAY` is set), and without arguments other than
    `name` and `tenant`, the client uses the gateway. The call is then collective over the world,
    and `tangram_hpc.comm` is the trainers' own communicator. In every other case, and when the
    gateway is lost, it uses the broker's socket.

    While a broker that has crashed is being started again, the call waits for it, for the broker's
    `grace_s` at most.

    In a trainer's rank (`RANK` and `WORLD_SIZE` are set, or there is a gateway rank), an uncaught
    BrokerUnreachable prints one line instead of a traceback from then on.

    Args:
        access: the access file; None for that of `job`, else `TANGRAM_ACCESS`, else that of
            `TANGRAM_JOB` or of the Slurm job that this process is in.
        job: the job's name, instead of `access`.
        address: the broker's address, `unix:PATH` or `tcp:HOST:PORT`, such as the near end of a
            tunnel; empty for the addresses in the access file. Whether the connection is encrypted,
            and with which certificate, the access file says.
        name: the client's name in `tangram info` and `tangram acct`, as it is given; empty for
            "host:pid", with the number of the Slurm job if that is not the broker's.
        tenant: the training run or team for which all that the client does counts, if several share
            the broker; empty for `TANGRAM_TENANT`, or the tenant `default` if that is not set.

    Returns:
        The client. Close it, or use it as a context manager.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
        AccessError: there is no access file, it must not be trusted, or its broker has gone.
        BrokerUnreachable: the broker does not answer.
        WrongWorld: the MPI world is not the one that was launched.

    Example:
        with tangram_hpc.connect() as client:
            client.submit("make test", cpus=4).result().check()
    """
    for field, text in (("job", job), ("address", address), ("name", name), ("tenant", tenant)):
        check_text("" if text is None else text, field)  # None, as of an option that is not given
    if access is not None and not isinstance(access, str | os.PathLike):
        raise InvalidInput(f"access: {access!r:.60} is not the path of a file")
    environ = os.environ
    tenant = tenant or environ.get("TANGRAM_TENANT", "")
    if tenant and not TENANT_NAME.fullmatch(tenant):
        raise InvalidInput(f"tenant={tenant!r} (or TANGRAM_TENANT): a tenant's name "
                           f"{TENANT_NAME_SAID}")
    in_world = environ.get("TANGRAM_GATEWAY") or _rank_pid == os.getpid()
    if in_world or (environ.get("RANK") and environ.get("WORLD_SIZE")):
        report_loss_in_one_line(environ)
    if access is None and not job and not address and in_world:
        return _connect_over_mpi(environ, name, tenant)
    path = Path(access) if access is not None else find_access(environ, job)
    dialer = AccessFileDialer(path, address)
    known = dialer.read()
    try:
        at = (f", address={address!r}" if address else "") + _for_tenant(tenant)
        return Client([socket_dial(dialer, known.job)], known.job, FolderStore,
                      name or _name_by_job(environ, known.job),
                      again=f"tangram_hpc.connect({str(path.absolute())!r}{at})",
                      back_within_s=known.back_within_s, tenant=tenant,
                      direct=direct_transport(dialer, known.job))
    except OutOfSight as error:  # it names its remedy
        raise AccessError(f"access file {path}: {error}") from None
    except BrokerUnreachable as error:
        raise AccessError(f"access file {path}: {error}; the job has ended or is suspended, its "
                          "broker was killed and is not back yet, or this host cannot reach it"
                          ) from None


def _connect_over_mpi(environ: Mapping[str, str], name: str, tenant: str) -> Client:
    """Makes a client that uses the world's gateway, and the socket when the gateway is lost."""
    from ..transport.mpi import mpi
    from ..transport.mpi.rank_card import RankCard

    global _rank_pid
    world = mpi.meet(environ, RankCard("trainer", VERSION))
    _rank_pid = os.getpid()
    # processes that this rank starts are not ranks: in them `connect()` uses the broker's socket
    os.environ["TANGRAM_ACCESS"] = world.access
    os.environ.pop("TANGRAM_GATEWAY", None)
    dialer = AccessFileDialer(Path(world.access))
    dials = [socket_dial(dialer, world.job)]
    if world.usable:
        spin_us = load_config(environ, say=world.rank == 0).gateway_spin_us
        dials.insert(0, lambda: world.dial(spin_us))
    elif world.rank == 0:
        print("tangram: MPI lacks MPI_THREAD_MULTIPLE: using the broker's socket", file=sys.stderr)
    client = Client(dials, world.job, FolderStore, name or _name_by_job(environ, world.job),
                    world.rank, world.size,
                    again=f"tangram_hpc.connect({world.access!r}{_for_tenant(tenant)})",
                    back_within_s=_back_within_s(dialer), tenant=tenant,
                    direct=direct_transport(dialer, world.job))
    world.keep(client)
    return client


def _name_by_job(environ: Mapping[str, str], job: str) -> str:
    """The name of a client that is in another Slurm job than its broker, so that users and
    accounting see in which one; empty for every other client.
    """
    own = environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    if not own or own == job.partition("@")[0]:
        return ""
    return f"{os.uname().nodename}:{os.getpid()} of job {own}"


def _for_tenant(tenant: str) -> str:
    """The argument by which another process connects for the same tenant; empty for none."""
    return f", tenant={tenant!r}" if tenant else ""


def _back_within_s(dialer: AccessFileDialer) -> float:
    """How long the broker may take to come back; 0 for a rank that cannot read the access file,
    which needs no more than its gateway.
    """
    try:
        return dialer.read().back_within_s
    except AccessError:
        return 0.0
