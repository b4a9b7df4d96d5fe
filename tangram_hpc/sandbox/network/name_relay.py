"""Carries DNS queries from a sandbox to the resolvers of its node, byte for byte.

The resolvers of a node may listen on its loopback, which the sandbox must not reach, and they may
change while it runs. So `/etc/resolv.conf` of the sandbox names its own loopback, and this relay
outside sends each query to port 53 of the resolvers that the node's file names then. It looks
into no query, and nothing but these resolvers is reached through it.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress

from .fenced_routes import NAMESERVER

RESOLV_CONF = "/etc/resolv.conf"
QUERIES_MAX = 64  # at once; further ones wait in their sockets
_SERVERS_MAX = 3  # as in libc
_PATIENCE_S = 2.0  # for each resolver; the programs ask again after 5 s
_IDLE_S = 10.0  # of a connection
_PIECE = 1 << 16
_PORT = 53
_PASSED_ON = ("search", "domain", "options")


def _lines() -> list[list[str]]:
    try:
        with open(RESOLV_CONF, errors="replace") as file:
            return [words for line in file if (words := line.split())]
    except OSError:
        return []


def resolvers() -> list[str]:
    """The addresses of the node's resolvers, in the order in which they are asked."""
    named = [words[1] for words in _lines() if words[0] == "nameserver" and words[1:]]
    return named[:_SERVERS_MAX] or [NAMESERVER[0]]  # resolv.conf(5): the own machine


def resolv_conf() -> str:
    """Returns the `/etc/resolv.conf` of a sandbox: the node's, but with the relay's address."""
    kept = [" ".join(words) for words in _lines() if words[0] in _PASSED_ON]
    return "\n".join([f"nameserver {NAMESERVER[0]}", *kept, ""])


class NameRelay:
    """Serves the sockets that a sandbox's programs ask.

    Args:
        datagrams: a bound UDP socket.
        streams: a listening TCP socket.
    """

    def __init__(self, datagrams: socket.socket, streams: socket.socket) -> None:
        self._datagrams, self._streams = datagrams, streams
        self._running = 0
        self._freed, self._free = socket.socketpair()
        for each in (datagrams, streams, self._freed, self._free):
            each.setblocking(False)

    def fds(self) -> list[int]:
        """Returns the descriptors to wait for before `serve`. While too many queries run, they
        bring no new query.
        """
        if self._running < QUERIES_MAX:
            return [self._freed.fileno(), self._datagrams.fileno(), self._streams.fileno()]
        return [self._freed.fileno()]

    def serve(self, fd: int) -> None:
        """Takes a query or a connection from a ready descriptor. Never waits."""
        try:
            if fd == self._freed.fileno():
                self._running -= len(self._freed.recv(QUERIES_MAX))
            elif self._running >= QUERIES_MAX:
                pass  # its other socket took the last place since `fds`
            elif fd == self._datagrams.fileno():
                query, asker = self._datagrams.recvfrom(_PIECE)
                self._start(self._ask, query, asker)
            else:
                line = self._streams.accept()[0]
                if not self._start(self._carry, line):
                    line.close()
        except OSError:
            pass  # the program that asked has closed its socket meanwhile

    def _start(self, work: Callable[..., None], *words: object) -> bool:
        """Runs `work` in a thread; returns whether a thread could be started."""
        import threading  # here, not above: see `run_program`

        def run() -> None:
            try:
                work(*words)
            finally:
                self._free.send(b"-")  # at most QUERIES_MAX bytes wait there, so it does not block

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:  # the user has as many threads as the kernel allows
            return False
        self._running += 1
        return True

    def _ask(self, query: bytes, asker: tuple[str, int]) -> None:
        for resolver in resolvers():
            with suppress(OSError), _to(resolver, socket.SOCK_DGRAM) as line:
                line.send(query)
                self._datagrams.sendto(line.recv(_PIECE), asker)
                return

    def _carry(self, asker: socket.socket) -> None:
        with asker:
            for resolver in resolvers():
                with suppress(OSError), _to(resolver, socket.SOCK_STREAM) as line:
                    _both_ways(asker, line)
                    return


def _to(resolver: str, kind: socket.SocketKind) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(resolver, _PORT, type=kind,
                                                  flags=socket.AI_NUMERICHOST)[0]
    line = socket.socket(family, kind)
    try:
        line.settimeout(_PATIENCE_S)
        line.connect(address)
    except OSError:
        line.close()
        raise
    return line


def _both_ways(one: socket.socket, other: socket.socket) -> None:
    """Carries bytes until either side ends or nothing comes."""
    for each in (one, other):
        each.settimeout(_IDLE_S)
    to = {one: other, other: one}
    while ready := select.select([one, other], [], [], _IDLE_S)[0]:
        for each in ready:
            data = each.recv(_PIECE)
            if not data:
                return
            to[each].sendall(data)
