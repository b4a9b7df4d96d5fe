"""Which address of this host is listened on, and which one is told to others.

The host's own name is no safe answer: Debian's and Ubuntu's hosts files give it 127.0.1.1, which
means another machine to everybody else. So the candidates are, in this order: what the host's names
stand for, the address from which the kernel would reach the other nodes of the job, the one from
which it would leave the network, the interfaces' own. The first that others can reach is taken.
Loopback and wildcard addresses are never told to other nodes: where there are some and nothing else
is found, the error names the setting `bind`. No packet is sent, and Slurm is not asked.
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
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_PEERS_MAX = 8  # other nodes whose names are looked up: all of a job share its networks
_FAR = ("192.0.2.1", "2001:db8::1")  # reserved for examples (RFC 5737, RFC 3849): nobody has them
_ANY_PORT = 9


class Addresses(NamedTuple):
    """An address to listen on, and the one that others are told; they differ for wildcards."""

    listen: str
    told: str


def addresses(bind: str, peers: Sequence[str] = (), names: Sequence[str] = (),
              shared: bool = True, needed: bool = False) -> Addresses:
    """Where to listen.

    Args:
        bind: the setting: an address or host name of this host, the name of an interface, a network
            such as "10.1.0.0/16", a wildcard ("0.0.0.0", "::"), or empty to choose.
        peers: other nodes that must reach this host, by name or address.
        names: what this host is called besides its host name, such as Slurm's NodeName.
        shared: whether others may come that are not among `peers`; otherwise loopback is taken
            where this host's name stands for it.
        needed: whether others will come for certain, although nobody knows their names yet.

    Raises:
        InvalidInput: `bind` fits nothing on this host, or no address can be told to others.
    """
    listen = _bound(bind)
    if listen and not _is_wildcard(listen):
        told = listen
    else:
        told = _chosen(peers, names, shared or bool(listen)) or LOOPBACK
    if (peers or needed) and _is_loopback(told):
        who = ", ".join(peers[:3]) + (", ..." if len(peers) > 3 else "") or "satellites to come"
        raise InvalidInput(
            f"config field `bind`: {told} means this host alone, and the job has other nodes "
            f"({who}); set `bind` to an interface, an address or a network that they reach (there "
            f"is {_shown()})")
    return Addresses(listen or told, told)


def rank_address(bind: str, peers: Sequence[str], names: Sequence[str] = ()) -> str:
    """Where other ranks meet this one, by the same rule. An address in `bind` that is another
    node's, as the broker's is for a trainer elsewhere, and "none" count as not set.

    Raises:
        InvalidInput: as `addresses`.
    """
    fixed = "/" in bind or bind in interfaces()
    if bind == "none" or (bind and not fixed and not any(map(_is_own, _resolved(bind)))):
        bind = ""
    return addresses(bind, peers, names, bool(peers)).told


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface that has one, IPv4 first (one of them)."""
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
            told = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(told[20:24])


def _shown() -> str:
    return ", ".join(f"{name} {'/'.join(found)}" for name, found in interfaces().items())


# ---- what `bind` means -------------------------------------------------------------------------


def _bound(bind: str) -> str:
    """The address that `bind` stands for; empty where it is empty."""
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
    candidates = (own, (_route_to(p) for p in peers[:_PEERS_MAX]), (_route_to(p) for p in _FAR),
                  (a for each in interfaces().values() for a in each))
    return next((a for each in candidates for a in each if a and _is_reachable(a)), "")


def _resolved(name: str) -> Iterator[str]:
    """What a name stands for, IPv4 first."""
    try:
        told = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family in (socket.AF_INET, socket.AF_INET6):
        yield from (str(at[0]) for kind, _, _, _, at in told if kind == family)


def _route_to(peer: str) -> str:
    """The address of ours from which the kernel would send to a peer; empty for none. Connecting a
    UDP socket looks the route up and sends nothing."""
    for address in _resolved(peer):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    return ""


def _is_own(address: str) -> bool:
    """Whether this host has an address: the kernel lets us bind to it."""
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


def _is_loopback(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def _is_reachable(address: str) -> bool:
    """Whether it can mean this host to others: no loopback, wildcard or link-local address."""
    found = ipaddress.ip_address(address)
    return not (found.is_loopback or found.is_unspecified or found.is_link_local
                or found.is_multicast)
