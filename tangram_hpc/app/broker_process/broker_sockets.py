"""Where a broker listens: a Unix socket for processes of its own node, and TCP for other nodes.

A peer is a client or a worker, as the key says that it proves. The broker's log names each peer
that is refused in one line.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...broker.driver import Broker
from ...config.settings import Config
from ...errors import InvalidInput
from ...storage.rundir import make_scratch
from ...transport.socket.asyncsock import Listener, SocketLink, listen_tcp, listen_unix
from ...transport.socket.certificate import Certificate, address_of, certificate_for
from ..broker_location import own_addresses
from .refusal_log import RefusalLog


class BrokerSockets:
    """The listening sockets of one broker, which hands it each peer that proves the key.

    Args:
        broker: the broker.
        config: the settings.
        environ: the environment of the broker's process.
        embedded: whether all its workers and clients are processes of its own node.
        satellites: whether workers outside of its job may join.

    Attributes:
        key: 32 random bytes that clients prove to have.
        worker_key: 32 other random bytes, which workers prove to have.
        addresses: what others dial.

    Raises:
        InvalidInput: the scratch folder or a socket cannot be made; what was made already is
            removed. The message names the setting.
    """

    def __init__(self, broker: Broker, config: Config, environ: Mapping[str, str], embedded: bool,
                 satellites: bool) -> None:
        self.key, self.worker_key = os.urandom(32), os.urandom(32)
        refused = RefusalLog(time.monotonic)
        self._scratch, ways = _open_ways(config, environ, embedded, satellites)
        self.addresses = tuple(way.address for way in ways)
        self._listeners = [
            Listener(way.sock, self.key, broker.settings.job,
                     lambda link: _converse(broker, link, refused), way.certificate,
                     self.worker_key, refused) for way in ways]

    def close(self) -> None:
        """Closes the sockets, and removes the folder of the Unix socket."""
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _converse(broker: Broker, link: SocketLink, refused: RefusalLog) -> None:
    peer = broker.accept(link, link.role, lambda why: refused(link.name, why))
    link.attach(partial(broker.receive, peer), lambda: broker.room(peer),
                lambda reason: broker.lost(peer, reason), broker.turns.length)


class _Way(NamedTuple):
    """A socket on which the broker listens, and what others are told.

    Attributes:
        sock: the listening socket.
        address: what others dial.
        certificate: with which its connections are encrypted; None if they are not.
    """

    sock: socket.socket
    address: str
    certificate: Certificate | None = None


def _open_ways(config: Config, environ: Mapping[str, str], embedded: bool, satellites: bool
               ) -> tuple[Path, list[_Way]]:
    """Returns a new scratch folder and the ways to this broker.

    Raises:
        InvalidInput: the folder or a socket cannot be made; what was made already is removed. The
            message names the setting.
    """
    scratch, ways = make_scratch(environ, config.scratch, "broker"), list[_Way]()
    unix = scratch / "broker.sock"
    try:
        ways.append(_Way(_listen_unix(unix), f"unix:{unix}"))
        if (own := own_addresses(config.bind, {} if embedded else environ,
                                 satellites)) is not None:
            sock = _listen_tcp(own.listen, config.ports)
            certificate = certificate_for(own.listen) if config.encryption == "tls" else None
            ways.append(_Way(sock, address_of(own.advertised, sock.getsockname()[1], certificate),
                             certificate))
    except InvalidInput:
        for way in ways:
            way.sock.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return scratch, ways


def _listen_unix(path: Path) -> socket.socket:
    try:
        return listen_unix(str(path))
    except OSError as error:
        raise InvalidInput(f"scratch {path.parent.parent}: no socket can be made there "
                           f"({error.strerror or error}); set `scratch` to a node-local folder "
                           "with a short name") from None


def _listen_tcp(address: str, ports: str) -> socket.socket:
    first, _, last = ports.partition("-")
    asked = range(int(first), int(last or first) + 1) if ports else (0,)
    try:
        return listen_tcp(address, asked)
    except (OSError, OverflowError) as error:  # OverflowError: there are ports up to 65535
        why = error.strerror if isinstance(error, OSError) else error
        if ports:
            raise InvalidInput(f"config field `ports`: no port of {ports} can be had on {address} "
                               f"({why}); each broker on a node needs one of its own") from None
        raise InvalidInput(f"config field `bind`: cannot listen on {address} ({why})") from None
