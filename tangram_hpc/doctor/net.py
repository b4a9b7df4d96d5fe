"""Whether a broker that runs here can be reached: by this node, and by the others of the job.

Law: listens where the broker would, with its own listener and handshake and a key that dies with
the check. The key goes to other nodes by the access file only, as a worker gets it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AccessError, BrokerUnreachable
from ..slurm.job_environment import unsized
from ..storage.access import Access, write_access
from ..storage.rundir import tangram_home
from ..transport.socket import address
from ..transport.socket.asyncsock import Listener, SocketLink, listen_tcp, listen_unix
from ..transport.socket.dial import dial
from .check import JOB, LOGIN, Finding, Item, Where, fail, ok, skip, warn
from .deadline import CommandOutput, run_step
from .storage import NoFolder, scratch_base, trial_folder

STEP = f"{__package__}.step"
_STEP_S = 45.0
_JOB = "doctor"
_TIMES = 5
_SKEW_S = 2.0
T = TypeVar("T")


def interfaces(where: Where) -> Finding:
    """Those that have an address."""
    found = []
    for name, told in address.interfaces().items():
        try:
            state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        except OSError:
            state = "unknown"
        shown = f"{name} {'/'.join(told)}"
        found.append(f"{shown}{'' if state in ('up', 'unknown') else f' ({state})'}")
    return ok(", ".join(found)) if found else warn("none has an address", "ask the site")


def own_address(where: Where) -> Finding:
    """Where a broker on this node would listen, and what it would tell others."""
    if where.no_address:
        return fail(where.no_address, "set `bind` as it says, or ask the site which network its "
                                      "nodes share")
    if not where.address:
        return skip("the setting `bind` is \"none\": the Unix socket only")
    text = f"{where.address} ({'by `bind`' if where.config.bind else 'chosen'})"
    if where.listen not in ("", where.address):
        text += f", listening on {where.listen}"
    if where.kind == JOB and ipaddress.ip_address(where.address).is_loopback:
        return warn(f"{text}: only this machine can reach it",
                    "set `bind` to the interface that satellites would come by")
    return ok(text + ("; a job's broker listens on its own node" if where.kind == LOGIN else ""))


def _none(where: Where) -> Finding | None:
    """Why there is nothing to reach over TCP."""
    if where.no_address:
        return skip("there is no address to listen on: see `address`")
    return None if where.address else skip("the setting `bind` is \"none\"")


# ---- connecting to ourselves ---------------------------------------------------------------------


def unix(where: Where) -> Finding:
    """The broker's Unix socket, in a folder as its own."""
    job = f"job{where.place.job}-" if where.place is not None else ""
    with trial_folder(scratch_base(where), f"tangram-broker-{job}") as folder:
        path = str(folder / "broker.sock")
        return _answered(f"unix:{path}", lambda: listen_unix(path),
                         "set `scratch` to a node-local folder with a short path")


def tcp(where: Where) -> Finding:
    """The broker's TCP address, through its interface."""
    if (none := _none(where)) is not None:
        return none
    return _answered(f"tcp:{where.address}", lambda: listen_tcp(where.listen or where.address),
                     "set `bind` to an address of this node (see `interfaces`)", where.address)


def _answered(shown: str, listen: Callable[[], socket.socket], remedy: str, told: str = ""
              ) -> Finding:
    key = os.urandom(32)
    try:
        sock = listen()
    except OSError as error:
        return fail(f"{shown}: cannot listen: {error.strerror or error}", remedy)
    name = sock.getsockname()
    to = f"unix:{name}" if isinstance(name, str) else f"tcp:{told or name[0]}:{name[1]}"
    try:
        times = asyncio.run(_served(sock, key, lambda: [_dialled(to, key) for _ in range(_TIMES)]))
    except (AccessError, BrokerUnreachable) as error:
        return fail(f"{shown}: {error}", remedy)
    return ok(f"{shown} was reached with the job's handshake in "
              f"{statistics.median(times) * 1000:.1f} ms")


def _dialled(to: str, key: bytes) -> float:
    began = time.perf_counter()
    dial([to], key, _JOB).close()
    return time.perf_counter() - began


async def _served(sock: socket.socket, key: bytes, work: Callable[[], T]) -> T:
    """Does blocking work while a broker's listener answers on the socket."""
    links: list[SocketLink] = []
    listener = Listener(sock, key, _JOB, links.append)
    try:
        return await asyncio.get_running_loop().run_in_executor(None, work)
    finally:
        await asyncio.sleep(0.01)  # the last handshake's other half
        listener.close()
        for link in links:
            link.close()


# ---- the other nodes -----------------------------------------------------------------------------


def nodes(where: Where) -> Finding:
    """One task on each node of the job reads the access file and dials back."""
    if where.kind != JOB:
        return skip("not inside a job")
    if (none := _none(where)) is not None:
        return none
    if not where.slurm.conf:
        return skip("the controller does not answer, so no step can be made")
    assert where.place is not None
    groups, key = where.place.nodes, os.urandom(32)
    size = ([f"--nodes={groups[0]}", f"--ntasks={groups[0]}"] if len(groups) == 1
            else [f"--het-group=0-{len(groups) - 1}"])
    try:
        with trial_folder(tangram_home(where.environ)) as folder:
            sock = listen_tcp(where.listen or where.address)
            port = sock.getsockname()[1]
            path = folder / "access.json"
            write_access(path, Access(_JOB, (f"tcp:{where.address}:{port}",), key, str(folder)))
            argv = ["--overlap", "--overcommit", *size, "--ntasks-per-node=1",
                    "--cpus-per-task=1", "--mem=0", "--gres=none", "--mpi=none",
                    "--kill-on-bad-exit=0", "--input=none", sys.executable, "-m", STEP, str(path)]
            before = time.time()
            told = asyncio.run(_served(sock, key, lambda: _step(argv, where, sum(groups))))
    except NoFolder:
        raise
    except OSError as error:
        return fail(f"cannot begin: {error.strerror or error}", "see `tcp`")
    return _judged(told, sum(groups), before, time.time())


def _step(argv: list[str], where: Where, count: int) -> CommandOutput:
    """The step's words. One that did not run everywhere, and of which no node says why, is tried
    once more: a step may be refused while another one of the job ends, and where SrunPortRange is
    set the threads that srun has for its het components may take each other's port."""
    told = run_step(argv, unsized(where.environ), _STEP_S)
    rows = _rows(told)
    if len(rows) < count and not any(row["why"] for row in rows):
        told = run_step(argv, unsized(where.environ), _STEP_S)
    return told


def _rows(told: CommandOutput) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.out.splitlines() if line.startswith("{")]


def _judged(told: CommandOutput, count: int, before: float, after: float) -> Finding:
    """`before` and `after`: our clock around the step; the others' must lie between."""
    rows = _rows(told)
    well = [row for row in rows if not row["why"]]
    if len(well) == count:
        slowest = max(row["ms"] for row in well)
        text = f"{', '.join(sorted(row['node'] for row in well))}: a step on each read the " \
               f"access file and reached the broker's address (slowest {slowest:.1f} ms)"
        off = {row["node"]: max(before - row["clock"], row["clock"] - after) for row in rows}
        worst = max(off, key=lambda node: off[node])
        if off[worst] > _SKEW_S:
            return warn(f"{text}; the clock of {worst} differs from ours by {off[worst]:.1f} s",
                        "have the site synchronise clocks: a node's end would be misjudged")
        return ok(f"{text}; no clock differs by seconds")
    bad = next((f"{row['node']}: {row['why']}" for row in rows if row["why"]), told.last)
    return fail(f"{len(well)} of {count} nodes reach a broker here; {bad}",
                "an access file that is not there: TANGRAM_HOME must be on a file system that all "
                "nodes share; no answer: set `bind` to the address of an interface they share")


CHECKS = (
    Item("interfaces", interfaces), Item("address", own_address, 15.0, "the name service hangs"),
    Item("unix socket", unix, 20.0), Item("tcp", tcp, 20.0),
    Item("nodes", nodes, 110.0, "a step hangs: look at `squeue -s`"),
)
