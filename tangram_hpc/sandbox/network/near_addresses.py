"""Tells which addresses belong to this node, or to a network that it is connected to without a
router.

A cluster's own services often listen on such addresses, even if they are addresses of the public
Internet. A session with a filtered network reaches them only if its allow-list names them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from ...protocol.allow_list import Address

_ROUTES, _ROUTES6 = "/proc/net/route", "/proc/net/ipv6_route"
_DESTINATION, _FLAGS, _MASK = 1, 3, 7  # columns of _ROUTES
_DESTINATION6, _BITS6, _GATEWAY6 = 0, 1, 4  # columns of _ROUTES6
_BY_GATEWAY = 0x2
_PIECE = 1 << 16


class NearAddresses:
    """The addresses that are near, by the kernel's routing tables, which each call reads anew.

    Create the object before the process confines itself: its constructor opens the tables.

    Raises:
        OSError: a routing table exists and cannot be opened.
    """

    def __init__(self) -> None:
        self._routes, self._routes6 = _table(_ROUTES), _table(_ROUTES6)

    def has(self, address: Address) -> bool:
        """Returns whether an address is this node's own or in a network that it is connected to."""
        blocks = _blocks(_rows(self._routes), _rows(self._routes6))
        return _is_own(address) or any(address in block for block in blocks)


def _is_own(address: Address) -> bool:
    """Returns whether a socket can be bound to an address: the kernel allows this only for the
    node's own addresses."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
        return True
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _blocks(routes: list[list[str]], routes6: list[list[str]]
            ) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Returns the networks that have a route without a gateway."""
    found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    for row in routes[1:]:
        mask = _number(row[_MASK])
        if mask and not int(row[_FLAGS], 16) & _BY_GATEWAY:
            found.append(ipaddress.IPv4Network((_number(row[_DESTINATION]), mask.bit_count()),
                                               strict=False))
    for row in routes6:
        bits = int(row[_BITS6], 16)
        if bits and not int(row[_GATEWAY6], 16):
            found.append(ipaddress.IPv6Network((int(row[_DESTINATION6], 16), bits), strict=False))
    return found


def _number(text: str) -> int:
    """Returns a number of the kernel's table, which is written in the machine's byte order."""
    return socket.ntohl(int(text, 16))


def _table(path: str) -> int:
    """Opens a table; -1 where the kernel has none, because it does not know this protocol."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _rows(table: int) -> list[list[str]]:
    text, piece = b"", b"x"
    while piece and table >= 0:
        piece = os.pread(table, _PIECE, len(text))
        text += piece
    return [line.split() for line in text.decode().splitlines()]
