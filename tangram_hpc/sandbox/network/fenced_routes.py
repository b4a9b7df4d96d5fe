"""Works in the network namespace of a sandbox before its code runs: routes that lead nowhere, and
the sockets on which its resolver listens.

A user-mode stack connects from the node's network for the sandbox, so a packet to 127.0.0.1 that
came to it would reach the node's loopback. The kernel sends none there on its own, but any process
can bind a socket to a device, and then the packet takes the default route (slirp4netns 1.2.0 passes
it on, whatever its option `--disable-host-loopback`). With a route of their own such addresses are
looked for on the wire, where the stack does not answer for them.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
from contextlib import suppress

NAMESERVER = ("127.0.0.1", 53)  # the resolver of a program that finds no resolv.conf
_NS_GET_USERNS = 0xB701
_NEWROUTE, _ERROR = 24, 2
_REQUEST = 0x1 | 0x4 | 0x200 | 0x400  # NLM_F_REQUEST, ACK, EXCL, CREATE
_MAIN, _STATIC, _UNIVERSE, _UNREACHABLE, _DESTINATION = 254, 4, 0, 7, 1
_EXISTS = 17
# The loopback, "this network", and the addresses at which clouds tell a machine about itself: the
# link-local ones, and one each of Azure and of Alibaba.
NOWHERE = (("127.0.0.0", 8), ("0.0.0.0", 8), ("169.254.0.0", 16), ("168.63.129.16", 32),
           ("100.100.100.200", 32))
_BACKLOG = 16


def namespaces_of(pid: int) -> tuple[int, int]:
    """Opens the network namespace of a process, and the user namespace that owns it.

    Raises:
        OSError: the process has ended, or its network namespace belongs to a user namespace above
            this process's own, as the node's does.
    """
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = fcntl.ioctl(network, _NS_GET_USERNS)
    except OSError:
        os.close(network)
        raise
    os.set_inheritable(owner, False)
    return network, owner


def prepare(network: int, owner: int) -> list[socket.socket]:
    """Fences the network namespace, and returns a UDP socket and a listening TCP socket at
    `NAMESERVER` in it. A child process enters the namespace for this; this process stays outside.

    Raises:
        OSError: the namespace cannot be entered or changed.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        child = os.fork()
        if child == 0:
            try:
                _inside(network, owner, there)
            finally:
                os._exit(1)
        there.close()
        sockets = array.array("i")
        # the stack, which is started later, must not have them
        said, more, _, _ = here.recvmsg(1000, socket.CMSG_SPACE(2 * sockets.itemsize),
                                        socket.MSG_CMSG_CLOEXEC)
        os.waitpid(child, 0)
    for _, _, data in more:
        sockets.frombytes(data)
    if len(sockets) != 2:
        raise OSError(0, said.decode(errors="replace") or "it could not be entered")
    return [socket.socket(fileno=fd) for fd in sockets]


def _inside(network: int, owner: int, told: socket.socket) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for space in (owner, network):
            # root may own its network without a user namespace in between, and is inside already
            if libc.setns(space, 0) != 0 and (space == network or ctypes.get_errno() != 22):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _fence()
        with (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
              socket.socket(socket.AF_INET, socket.SOCK_STREAM) as streams):
            for each in (datagrams, streams):
                each.bind(NAMESERVER)
            streams.listen(_BACKLOG)
            socket.send_fds(told, [b"+"], [datagrams.fileno(), streams.fileno()])
    except OSError as error:
        with suppress(OSError):
            told.send(f"its network cannot be prepared ({error.strerror})".encode())


def _fence() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        for address, bits in NOWHERE:
            route = struct.pack("BBBBBBBBI", socket.AF_INET, bits, 0, 0, _MAIN, _STATIC, _UNIVERSE,
                                _UNREACHABLE, 0)
            route += struct.pack("HH4s", 8, _DESTINATION, socket.inet_aton(address))
            link.send(struct.pack("IHHII", 16 + len(route), _NEWROUTE, _REQUEST, 1, 0) + route)
            _, kind, _, _, _, code = struct.unpack_from("IHHIIi", link.recv(4096))
            if kind != _ERROR or -code not in (0, _EXISTS):
                raise OSError(-code, os.strerror(-code))
