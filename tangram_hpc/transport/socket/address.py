"""Chooses the address on which this host listens, and the one that is told to others.

The host's own name is no safe answer: the hosts files of Debian and Ubuntu give it 127.0.1.1, which
on any other machine means that machine. The candidates are therefore, in this order: the addresses
of the host's names, the address from which the kernel would reach the other nodes of the job, the
address from which it would send to other networks, and the addresses of the interfaces. The first
address that others can reach is taken.

A host that is none of the job's nodes, such as the login node under `salloc`, has its name in the
users' network, and the nodes may be in another one. There the route to the nodes comes before the
host's names.

Other nodes are never told a loopback or wildcard address: if nothing else is found and there are
other nodes, the error names the setting `bind`. No packet is sent, and Slurm is not asked.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidInput

LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # ioctl SIOCGIFADDR
_PEERS_MAX = 8  # how many nodes' names are looked up; all nodes of a job share its networks
_FAR = ("192.0.2.1", "2001:db8::1")  # addresses outside every site's networks (RFC 5737, RFC 3849)
_ANY_PORT = 9  # a route lookup needs a port, and any will do


class Addresses(NamedTuple):
    """The address to listen on, and the one that others are told. They differ if `listen` is a
    wildcard.

    Attributes:
        listen: The address to bind.
        advertised: The address that others connect to.
    """

    listen: str
    advertised: str


def addresses(bind: str, peers: Sequence[str] = (), names: Sequence[str] = (),
              shared: bool = True, needed: bool = False) -> Addresses:
    """Returns the address to listen on, and the one to tell others.

    Args:
        bind: the setting: an address or host name of this host, the name of an interface, a network
            such as "10.1.0.0/16", a wildcard ("0.0.0.0", "::"), or empty to choose.
        peers: other nodes that must reach this host, by name or address.
        names: further names of this host, such as Slurm's NodeName; empty for a host that is no
            node of the job.
        shared: whether hosts that are not in `peers` may connect as well; if not, and this host's
            name means loopback, loopback is taken.
        needed: whether other hosts will certainly connect, though their names are not known yet.

    Raises:
        InvalidInput: `bind` fits nothing on this host, or no address can be told to others.
    """
    listen = _bound(bind)
    if listen and not _is_wildcard(listen):
        advertised = listen
    else:
        advertised = _chosen(peers, names, shared or bool(listen)) or LOOPBACK
    if (peers or needed) and is_loopback(advertised):
        who = ", ".join(peers[:3]) + (", ..." if len(peers) > 3 else "") or "satellites to come"
        raise InvalidInput(
            f"config field `bind`: {advertised} means this host alone, and the job has other nodes "
            f"({who}); set `bind` to an interface, an address or a network that they reach (there "
            f"is {_shown()})")
    return Addresses(listen or advertised, advertised)


def rank_address(bind: str, peers: Sequence[str], names: Sequence[str] = ()) -> str:
    """Returns the address at which other ranks reach this one, by the rule of `addresses`.

    A `bind` of "none", or one that is another node's address, counts as not set, because the
    settings are shared and may contain the broker's address.

    Raises:
        InvalidInput: as for `addresses`.
    """
    fixed = "/" in bind or bind in interfaces()
    if bind == "none" or (bind and not fixed and not any(map(_is_own, _resolved(bind)))):
        bind = ""
    return addresses(bind, peers, names, bool(peers)).advertised


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each interface that has one; an IPv4 address, if any, is first."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        if address := _ipv4_of(name):
            found.setdefault(name, []).append(address)
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            words = line.split()
            address = str(ipaddress.IPv6Address(bytes.fromhex(words[0])))
            found.setdefault(words[-1], []).append(address)
    return found


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(reply[20:24])


def _shown() -> str:
    return ", ".join(f"{name} {'/'.join(found)}" for name, found in interfaces().items())


# ---- what `bind` means -------------------------------------------------------------------------


def _bound(bind: str) -> str:
    """Returns the address that `bind` stands for; empty if `bind` is empty."""
    if not bind or _is_address(bind):
        return bind
    found = interfaces()
    if bind in found:
        return next((a for a in found[bind] if _is_reachable(a)), found[bind][0])
    if "/" in bind:
        return _within(bind, [a for each in found.values() for a in each])
    resolved = list(_resolved(bind))
    if not resolved:
        raise InvalidInput(f"config field `bind`: {bind!r} is no interface or address of this "
                           f"host; there is {_shown()}")
    return next((a for a in resolved if _is_reachable(a)), resolved[0])


def _within(network: str, own: Iterable[str]) -> str:
    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise InvalidInput(f"config field `bind`: {network!r} is no network such as 10.1.0.0/16"
                           ) from None
    for address in own:
        if ipaddress.ip_address(address) in wanted:
            return address
    raise InvalidInput(f"config field `bind`: this host has no address in {network}; there is "
                       f"{_shown()}")


# ---- choosing ------------------------------------------------------------------------------------


def _chosen(peers: Sequence[str], names: Sequence[str], shared: bool) -> str:
    own = [a for name in dict.fromkeys((socket.gethostname(), *names)) if name
           for a in _resolved(name) if _is_own(a)]
    if own and not shared and not peers and not any(map(_is_reachable, own)):
        return own[0]
    routes = (_route_to(peer) for peer in peers[:_PEERS_MAX])
    known = (own, routes) if names else (routes, own)
    candidates = (*known, (_route_to(address) for address in _FAR),
                  (a for each in interfaces().values() for a in each))
    return next((a for each in candidates for a in each if a and _is_reachable(a)), "")


def _resolved(name: str) -> Iterator[str]:
    """Yields the addresses of a name, IPv4 first; no address for an unknown name."""
    try:
        found = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family in (socket.AF_INET, socket.AF_INET6):
        yield from (str(at[0]) for kind, _, _, _, at in found if kind == family)


def _route_to(peer: str) -> str:
    """Returns our address from which the kernel would send to a peer; empty if there is no route.

    Connecting a UDP socket looks up the route and sends nothing.
    """
    for address in _resolved(peer):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    return ""


def _is_own(address: str) -> bool:
    """Returns whether an address belongs to this host: the kernel lets us bind only to such
    addresses.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL)
    return True


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_wildcard(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_unspecified


def is_loopback(address: str) -> bool:
    """Returns whether an address, or the name localhost, means the host that uses it."""
    return address == "localhost" or (
        _is_address(address) and ipaddress.ip_address(address).is_loopback)


def _is_reachable(address: str) -> bool:
    """Returns whether other hosts can reach this host at an address."""
    found = ipaddress.ip_address(address)
    return not (found.is_loopback or found.is_unspecified or found.is_link_local
                or found.is_multicast)
