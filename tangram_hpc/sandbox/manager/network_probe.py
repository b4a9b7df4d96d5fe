"""Tests whether a sandbox can have an open network here, by building one and attacking it.

A version of slirp4netns that lets a sandbox reach the loopback of its node must not be used. So
code inside tries the known ways there, and two sockets outside see whether something arrived. That
nothing arrives proves something only where packets do arrive, so before and after the attack the
same code must reach another address of the node. The process that calls this never enters the
sandbox, and is one that ends soon. No other machine is contacted; a packet may leave the node for
the address of the stack's name server, which belongs to nobody (RFC 5737).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...resources import process_tree
from ..isolation import join
from ..isolation.container_runtimes import SESSION, ContainerSpec, Runtime
from ..isolation.pause_process import PauseFailed, PauseProcess
from ..network import open_network
from ..network.fenced_routes import NOWHERE
from ..network.open_network import (
    DEVICE,
    GATEWAY,
    NAME_SERVER,
    NETWORK,
    STACK,
    NoOpenNetwork,
    OpenNetwork,
)

_LOOPBACK = "127.0.0.1"
_TRIES = ((_LOOPBACK, True), (GATEWAY, False), (GATEWAY, True), (NAME_SERVER, False))
_NOT_REACHED = [ipaddress.IPv4Network(block) for block in (*NOWHERE, NETWORK)]
_GET_ADDRESS = 0x8915  # ioctl SIOCGIFADDR
_PATIENCE_S = 4.0  # for packets that must arrive, on a busy node too
_PAUSE_S = 0.05
_WAIT_S = 0.1  # for packets that must not, after all of them were sent and a later one arrived
_NO_WAY = 2  # an exit status
_LEAKS = f"{STACK} lets sandboxes reach the node's loopback; install another version of it"


def why_not_open(runtime: Runtime, box: ContainerSpec, seconds: float) -> str:
    """Returns an empty string when sandboxes can have an open network, else one line that says why
    not. Takes a quarter of a second where it works, and nothing where a program is missing.

    Args:
        runtime: bubblewrap.
        box: the specification of a sandbox that bubblewrap can build here.
        seconds: how long building the sandbox may take. If the network carries nothing, the attack
            takes 4 to 8 s more.
    """
    if reason := open_network.why_not():
        return reason
    try:
        with _built(runtime, box, seconds) as pause:
            return _attacked(pause)
    except (OSError, PauseFailed, NoOpenNetwork) as error:
        return " ".join(str(error).split()) or f"the test failed ({type(error).__name__})"


@contextmanager
def _built(runtime: Runtime, box: ContainerSpec, seconds: float) -> Iterator[PauseProcess]:
    network = OpenNetwork(box.read)
    try:
        pause = PauseProcess(runtime.argv(box), runtime.env(os.environ), seconds)
        try:
            network.attach(pause.inside)
            yield pause
        finally:
            pause.end()
    finally:
        network.end()
        process_tree.end_beneath(2.0)


def _attacked(pause: PauseProcess) -> str:
    if not (address := _address()):
        return "the node has no IPv4 address but its loopback's, so the network cannot be tested"
    with _listening(address) as good, _listening(_LOOPBACK) as bad:
        child = os.fork()
        if child == 0:
            try:
                join.enter(pause.inside, SESSION)
                os._exit(_try(address, _ports(good), _ports(bad)))
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == _NO_WAY or (status == 0 and not _arrived(good, _PATIENCE_S)):
            return f"{STACK} carried nothing from a sandbox to {address} in {_PATIENCE_S:g} s"
        if status:
            return f"{STACK} made no device in a sandbox"
        return _LEAKS if select.select(bad, [], [], _WAIT_S)[0] else ""


def _address() -> str:
    """An IPv4 address of the node that a sandbox should reach; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = fcntl.ioctl(line, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                address = ipaddress.IPv4Address(reply[20:24])
                if not any(address in block for block in _NOT_REACHED):
                    return str(address)
    return ""


@contextmanager
def _listening(address: str) -> Iterator[list[socket.socket]]:
    """A listening TCP socket and a UDP socket at an address."""
    with (socket.create_server((address, 0)) as streams,
          socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams):
        datagrams.bind((address, 0))
        yield [streams, datagrams]


def _ports(sockets: list[socket.socket]) -> list[int]:
    return [each.getsockname()[1] for each in sockets]


def _arrived(sockets: list[socket.socket], seconds: float) -> bool:
    """Whether something comes to each of the sockets in this time."""
    end = time.monotonic() + seconds
    return all(select.select([each], [], [], max(0.0, end - time.monotonic()))[0]
               for each in sockets)


def _try(address: str, good: list[int], bad: list[int]) -> int:
    """Attacks between two calls that must succeed; returns an exit status. The stack takes packets
    in their order, so what the attack sent is through when the second call has arrived.
    """
    if DEVICE not in (name for _, name in socket.if_nameindex()):
        return 1
    end = time.monotonic() + _PATIENCE_S
    try:
        _connect(address, good[0], end)
        opened = _attack(*bad)
        _connect(address, good[0], end)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.sendto(b"x", (address, good[1]))
    except OSError:
        return _NO_WAY
    for each in opened:
        each.close()
    return 0


def _connect(address: str, port: int, end: float) -> None:
    """Connects once; raises OSError when `end` is past."""
    while True:
        # not create_connection, which imports a codec: the sandbox may not see Python's library
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as line:
            line.settimeout(max(0.01, end - time.monotonic()))
            try:
                line.connect((address, port))
                return
            except OSError:  # also after 3 s, when the stack has not told its hardware address
                if time.monotonic() >= end:
                    raise
        time.sleep(_PAUSE_S)


def _attack(stream_port: int, datagram_port: int) -> list[socket.socket]:
    """Tries to reach the ports; returns its sockets. A refused or lost packet is what it hopes for.
    """
    opened = []
    for address, by_device in _TRIES:
        for kind, port in ((socket.SOCK_STREAM, stream_port), (socket.SOCK_DGRAM, datagram_port)):
            line = socket.socket(socket.AF_INET, kind)
            line.setblocking(False)
            opened.append(line)
            with suppress(OSError):
                if by_device:
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, DEVICE.encode())
                line.connect((address, port))
                if kind == socket.SOCK_DGRAM:
                    line.send(b"x")
    return opened
