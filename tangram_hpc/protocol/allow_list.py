"""Allow-lists: which names and addresses a session with a filtered network may reach. Pure.

An entry is `NAME`, `*.NAME`, `*`, an IP address or a block of addresses (`10.1.0.0/16`), each with
an optional `:PORT` (or `:*` for any port; an IPv6 address with a port is written in brackets).
Without a port, 80 and 443 are meant. `*.NAME` is every name beneath NAME, and `*` every name.

A listed name gives access only to addresses of the public Internet. Any other address, such as the
node's loopback, its own addresses, its neighbours and private networks, must be listed as well. So
no answer of a name server can lead to an internal address that the list does not contain. A request
that names an address instead of a name is served only if the address is listed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InvalidInput

ENTRIES_MAX = 256
_ENTRY_MAX = 300  # characters
_DEFAULT_PORTS = (80, 443)
_ANY_PORT = 0
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*")
# names that some resolvers would take for an address: 2130706433, 0x7f.1
_NUMBER = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Entry(NamedTuple):
    """One entry: a name, or everything `beneath` a name, or a block of addresses."""

    name: str
    beneath: bool
    block: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    ports: tuple[int, ...]

    def has_port(self, port: int) -> bool:
        return self.ports == (_ANY_PORT,) or port in self.ports


class AllowList:
    """The entries of one session.

    Args:
        entries: the entries as their user wrote them.

    Raises:
        InvalidInput: one of them cannot be understood; the message names it.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [_entry(text) for text in entries]

    def names(self, host: str, port: int) -> bool:
        """Returns whether a name is listed. An address in any notation is not a name."""
        name = host.lower().removesuffix(".")
        if not _NAME.fullmatch(name) or _NUMBER.fullmatch(name):
            return False
        return any(one.block is None and one.has_port(port) and (
            name.endswith("." + one.name) if one.beneath and one.name else
            one.beneath or name == one.name) for one in self._entries)

    def lists(self, address: Address, port: int) -> bool:
        """Returns whether an address is listed, by itself or in a block."""
        return any(one.block is not None and one.has_port(port) and _plain(address) in one.block
                   for one in self._entries)


def checked_entries(entries: Iterable[str]) -> tuple[str, ...]:
    """Returns the entries of an allow-list.

    Raises:
        InvalidInput: there are none or too many, or one cannot be understood.
    """
    listed = tuple(entries)
    if not 0 < len(listed) <= ENTRIES_MAX:
        raise InvalidInput(f"network: an allow-list has 1 to {ENTRIES_MAX} entries, not "
                           f"{len(listed)}; network=False is for none")
    AllowList(listed)
    return listed


def is_public(address: Address) -> bool:
    """Returns whether an address belongs to the public Internet. An address with another address
    inside, to which a gateway would forward (6to4, Teredo, NAT64), is public only if both are."""
    address = _plain(address)
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        return all(one is None or one.is_global for one in inner)
    return True


def literal(host: str) -> Address | None:
    """Returns the IP address that a host is written as; None if the host is a name."""
    try:
        return _plain(ipaddress.ip_address(_bare(host)))
    except ValueError:
        return None


def _bare(host: str) -> str:
    """Returns an IPv6 address without the brackets around it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _plain(address: Address) -> Address:
    """Returns the IPv4 address inside an IPv4-mapped IPv6 address; any other address unchanged."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _entry(text: str) -> _Entry:
    if not isinstance(text, str) or not 0 < len(text) <= _ENTRY_MAX:
        raise InvalidInput(f"network: {text!r:.60} is no entry of an allow-list; write NAME, "
                           "NAME:PORT, *.NAME, ADDRESS or ADDRESS/BITS")
    host, ports = _split(text.strip().lower(), text)
    try:
        block = ipaddress.ip_network(_bare(host), strict=False)
    except ValueError:
        block = None
    if block is not None:
        return _Entry("", False, block, ports)
    name = host.removesuffix(".")
    beneath = name == "*" or name.startswith("*.")
    name = name[2:] if beneath else name
    if (name or not beneath) and (not _NAME.fullmatch(name) or _NUMBER.fullmatch(name)):
        raise InvalidInput(f"network: {text!r:.60} is neither a name nor an address; write NAME, "
                           "NAME:PORT, *.NAME, ADDRESS or ADDRESS/BITS")
    return _Entry(name, beneath, None, ports)


def _split(entry: str, text: str) -> tuple[str, tuple[int, ...]]:
    """Returns the host and the ports of an entry."""
    host, colon, port = entry.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or entry.endswith("]"):
        return entry, _DEFAULT_PORTS  # an IPv6 address without brackets has no port
    if port == "*":
        return host, (_ANY_PORT,)
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(f"network: {text!r:.60}: the port is not from 1 to 65535, nor *")
    return host, (int(port),)
