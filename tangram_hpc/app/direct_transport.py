"""How a client's direct calls are transported: where it listens, and what runs on the node.

A client listens on a Unix socket for nodes that are this host. If its broker listens on the network
too, nodes may be other hosts: then the client also listens on the address from which this host
reaches the broker, encrypted as the broker is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import InvalidInput, TangramError
from ..ports import DirectListener, DirectTransport
from ..transport.socket.address import is_loopback, rank_address
from ..transport.socket.direct_listener import SocketDirectListener
from .access_dial import AccessFileDialer


def direct_transport(dialer: AccessFileDialer, job: str) -> DirectTransport:
    """Returns the transport of a client whose broker wrote the access file.

    Args:
        dialer: reads the access file.
        job: the job's name.
    """
    known: list[str] = []

    def listen() -> DirectListener:
        with suppress(TangramError):  # the broker is being started again: its last addresses count
            known[:] = dialer.read().addresses
        return SocketDirectListener(job, own_address(known),
                                    any(each.startswith("tls:") for each in known))

    return DirectTransport(listen, _server)


def own_address(broker: Sequence[str]) -> str:
    """Returns the address of this host for the nodes of a broker; empty if they are this host, or
    cannot reach it.

    Args:
        broker: the broker's addresses, as `dial` takes them. A loopback address says nothing about
            the route to the nodes, since it may be the end of a tunnel.
    """
    found = (each.partition(":")[2].partition("#")[0].rpartition(":")[0].strip("[]")
             for each in broker if not each.startswith("unix:"))
    hosts = [host for host in found if not is_loopback(host)]
    if not hosts:
        return ""
    try:
        return rank_address("", hosts)
    except InvalidInput:  # no other host can reach this one
        return ""


def _server() -> Callable[..., object]:
    # imported with the first direct call, as only runners need what it imports
    from .direct_server import serve_direct_calls

    return serve_direct_calls
