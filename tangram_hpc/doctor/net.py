"""Checks whether a broker on this node can be reached from here and from the job's other nodes.

The checks listen where the broker would, with the broker's listener and handshake and a key that
only the check uses. Other nodes get the key through an access file only, as workers do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AccessError, BrokerUnreachable
from ..slurm.job_environment import unsized
from ..start_module import module_command
from ..storage.access import NAME as ACCESS
from ..storage.access import Access, write_access
from ..storage.rundir import tangram_home
from ..transport.socket import address
from ..transport.socket.asyncsock import Listener, SocketLink, listen_tcp, listen_unix
from ..transport.socket.certificate import Certificate, address_of, certificate_for
from ..transport.socket.dial import dial
from .check import JOB, LOGIN, CheckContext, CheckSpec, Finding, fail, ok, skip, warn
from .deadline import CommandOutput, run_step
from .storage import NoFolder, scratch_base, trial_folder

STEP = f"{__package__}.step"
_STEP_S = 45.0
_JOB = "doctor"
_TIMES = 5
_SKEW_S = 2.0
T = TypeVar("T")


def interfaces(context: CheckContext) -> Finding:
    """Reports the network interfaces that have an address."""
    found = []
    for name, found_addresses in address.interfaces().items():
        try:
            state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        except OSError:
            state = "unknown"
        shown = f"{name} {'/'.join(found_addresses)}"
        found.append(f"{shown}{'' if state in ('up', 'unknown') else f' ({state})'}")
    return ok(", ".join(found)) if found else warn("none has an address", "ask the site")


def own_address(context: CheckContext) -> Finding:
    """Checks where a broker on this node would listen, and what it would tell others."""
    if context.no_address:
        return fail(context.no_address, "set `bind` as it says, or ask the site which network its "
                                      "nodes share")
    if not context.address:
        return skip("the setting `bind` is \"none\": the Unix socket only")
    text = f"{context.address} ({'by `bind`' if context.config.bind else 'chosen'})"
    if context.listen not in ("", context.address):
        text += f", listening on {context.listen}"
    if context.kind == JOB and ipaddress.ip_address(context.address).is_loopback:
        return warn(f"{text}: only this machine can reach it",
                    "set `bind` to the interface that satellites would come by")
    return ok(text + ("; a job's broker listens on its own node" if context.kind == LOGIN else ""))


def _none(context: CheckContext) -> Finding | None:
    """Returns why there is nothing to reach over TCP, or None if there is something."""
    if context.no_address:
        return skip("there is no address to listen on: see `address`")
    return None if context.address else skip("the setting `bind` is \"none\"")


# ---- connecting to ourselves ---------------------------------------------------------------------


def unix(context: CheckContext) -> Finding:
    """Checks a Unix socket in a folder like the broker's."""
    job = f"job{context.place.job}-" if context.place is not None else ""
    with trial_folder(scratch_base(context), f"tangram-broker-{job}") as folder:
        path = str(folder / "broker.sock")
        return _answered(f"unix:{path}", lambda: listen_unix(path),
                         "set `scratch` to a node-local folder with a short path")


def tcp(context: CheckContext) -> Finding:
    """Checks the broker's TCP address, through the interface of that address."""
    if (none := _none(context)) is not None:
        return none
    listen = context.listen or context.address
    return _answered(f"tcp:{context.address}", lambda: listen_tcp(listen),
                     "set `bind` to an address of this node (see `interfaces`)", context.address,
                     _certificate(context, listen))


def _certificate(context: CheckContext, listen: str) -> Certificate | None:
    return certificate_for(listen) if context.config.encryption == "tls" else None


def _answered(shown: str, listen: Callable[[], socket.socket], remedy: str, host: str = "",
              certificate: Certificate | None = None) -> Finding:
    key = os.urandom(32)
    try:
        sock = listen()
    except OSError as error:
        return fail(f"{shown}: cannot listen: {error.strerror or error}", remedy)
    name = sock.getsockname()
    to = (f"unix:{name}" if isinstance(name, str) else
          address_of(host or name[0], name[1], certificate))
    try:
        times = asyncio.run(_served(sock, key, lambda: [_dialled(to, key) for _ in range(_TIMES)],
                                    certificate))
    except (AccessError, BrokerUnreachable) as error:
        return fail(f"{shown}: {error}", remedy)
    return ok(f"{shown} was reached with the job's handshake in "
              f"{statistics.median(times) * 1000:.1f} ms{', encrypted' if certificate else ''}")


def _dialled(to: str, key: bytes) -> float:
    began = time.perf_counter()
    dial([to], key, _JOB).close()
    return time.perf_counter() - began


async def _served(sock: socket.socket, key: bytes, work: Callable[[], T],
                  certificate: Certificate | None) -> T:
    """Runs blocking work in a thread while a broker's listener answers on the socket."""
    links: list[SocketLink] = []
    listener = Listener(sock, key, _JOB, links.append, certificate)
    try:
        return await asyncio.get_running_loop().run_in_executor(None, work)
    finally:
        await asyncio.sleep(0.01)  # the listener must finish the last handshake
        listener.close()
        for link in links:
            link.close()


# ---- the other nodes -----------------------------------------------------------------------------


def nodes(context: CheckContext) -> Finding:
    """Runs one task on each node of the job, which reads the access file and connects to this node.
    """
    if context.kind != JOB:
        return skip("not inside a job")
    if (none := _none(context)) is not None:
        return none
    if not context.slurm.conf:
        return skip("the controller does not answer, so no step can be made")
    assert context.place is not None
    groups, key = context.place.nodes, os.urandom(32)
    size = ([f"--nodes={groups[0]}", f"--ntasks={groups[0]}"] if len(groups) == 1
            else [f"--het-group=0-{len(groups) - 1}"])
    try:
        with trial_folder(tangram_home(context.environ)) as folder:
            listen = context.listen or context.address
            sock = listen_tcp(listen)
            certificate = _certificate(context, listen)
            path = folder / ACCESS
            to = address_of(context.address, sock.getsockname()[1], certificate)
            write_access(path, Access(_JOB, (to,), key, str(folder)))
            argv = ["--overlap", "--overcommit", *size, "--ntasks-per-node=1",
                    "--cpus-per-task=1", "--mem=0", "--gres=none", "--mpi=none",
                    "--kill-on-bad-exit=0", "--input=none", *module_command(STEP, str(path))]
            before = time.time()
            output = asyncio.run(_served(sock, key, lambda: _step(argv, context, sum(groups)),
                                         certificate))
    except NoFolder:
        raise
    except OSError as error:
        return fail(f"cannot begin: {error.strerror or error}", "see `tcp`")
    return _finding(output, sum(groups), before, time.time())


def _step(argv: list[str], context: CheckContext, count: int) -> CommandOutput:
    """Runs the job step, and once more if it did not run on every node and no node says why.

    Slurm may refuse a job step while another step of the job ends. And where SrunPortRange is set,
    srun's threads for the components of a het job may try to use the same port.
    """
    output = run_step(argv, unsized(context.environ), _STEP_S)
    rows = _rows(output)
    if len(rows) < count and not any(row["why"] for row in rows):
        output = run_step(argv, unsized(context.environ), _STEP_S)
    return output


def _rows(output: CommandOutput) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.out.splitlines() if line.startswith("{")]


def _finding(output: CommandOutput, count: int, before: float, after: float) -> Finding:
    """Returns the finding that follows from the nodes' answers.

    Args:
        output: What the job step printed.
        count: How many nodes the job has.
        before: Our clock before the step, epoch seconds; the nodes' clocks must not be earlier.
        after: Our clock after the step, epoch seconds; the nodes' clocks must not be later.
    """
    rows = _rows(output)
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
    bad = next((f"{row['node']}: {row['why']}" for row in rows if row["why"]), output.last)
    return fail(f"{len(well)} of {count} nodes reach a broker here; {bad}",
                "an access file that is not there: TANGRAM_HOME must be on a file system that all "
                "nodes share; no answer: set `bind` to the address of an interface they share")


CHECKS = (
    CheckSpec("interfaces", interfaces),
    CheckSpec("address", own_address, 15.0, "the name service hangs"),
    CheckSpec("unix socket", unix, 20.0), CheckSpec("tcp", tcp, 20.0),
    CheckSpec("nodes", nodes, 110.0, "a step hangs: look at `squeue -s`"),
)
