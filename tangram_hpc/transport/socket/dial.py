"""Connects to a broker: tries its addresses in order, then runs the mutual challenge. Blocking.

An address is `unix:PATH`, `tls:HOST:PORT#FINGERPRINT` with the fingerprint of the certificate that
the broker shows (`encryption.py`), or `tcp:HOST:PORT` where encryption is turned off. Before the
broker has proven the key, nothing but our nonce and our proof is sent. Every failure is one line
that names the address.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from ...errors import AccessError, BrokerUnreachable, InvalidInput
from ...protocol import auth
from ...protocol.frame import RECEIVE
from ...storage.access import read_access
from .encryption import Encryption, dialling_context
from .socket_connection import SocketConnection
from .tcp_options import HANDSHAKE_S, tune


def dial(addresses: Sequence[str], key: bytes, job: str, nobody: str = "no broker answers"
         ) -> SocketConnection:
    """Returns an authenticated, blocking connection to the first address that answers.

    Args:
        addresses: `unix:PATH`, `tls:HOST:PORT#FINGERPRINT` or `tcp:HOST:PORT`, in the order in
            which they are tried.
        key: The job's secret.
        job: The job's name, which is part of the proof.
        nobody: What the error says where no address answers.

    Raises:
        AccessError: A broker answers but does not accept the key, or is another job's.
        BrokerUnreachable: No address answers. Its `refused` says whether every address refused the
            connection at once, so that no broker listens there.
    """
    problems, refused = [], bool(addresses)
    for address in addresses:
        try:
            sock = _connect(address)
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
            refused &= isinstance(error, ConnectionRefusedError | FileNotFoundError)
            continue
        try:
            sock.settimeout(HANDSHAKE_S)
            connection = SocketConnection(sock, _encrypted(sock, address))
            prove(connection, key, job)
            sock.settimeout(None)
        except (OSError, AccessError) as error:
            sock.close()
            if isinstance(error, AccessError):
                raise
            problems.append(f"{address}: {error.strerror or error}")
            refused = False
            continue
        tune(sock)
        return connection
    unanswered = BrokerUnreachable(f"job {job}: {nobody} ({'; '.join(problems) or 'no address'})")
    unanswered.refused = refused
    raise unanswered


def through(address: str, known: Sequence[str]) -> str:
    """Returns an address that a user gave, such as a tunnel's end `tcp:localhost:7000`, with the
    fingerprint of the broker that it leads to.

    Args:
        address: what the user gave; a `tcp:` address becomes a `tls:` one if the broker encrypts.
        known: the broker's own addresses.
    """
    fingerprint = next((a.partition("#")[2] for a in known if a.startswith("tls:")), "")
    scheme, _, rest = address.partition(":")
    return f"tls:{rest}#{fingerprint}" if fingerprint and scheme == "tcp" else address


def probe_broker(access: Path, patience_s: float) -> str:
    """Tries for `patience_s` seconds at most to reach the broker of an access file.

    Returns:
        "open" if it answers; "" if there is no broker any more; "shut" if the broker could not be
        reached and may still run.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            known = read_access(access)
            dial(known.addresses, known.key, known.job).close()
            return "open"
        except AccessError:
            return ""
        except BrokerUnreachable as error:
            if error.refused:
                return ""
            time.sleep(1)
    return "shut"


def _connect(address: str) -> socket.socket:
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HANDSHAKE_S)
        try:
            sock.connect(rest)
        except OSError:
            sock.close()
            raise
        return sock
    where, _, fingerprint = rest.partition("#")
    host, _, port = where.rpartition(":")
    if scheme != ("tls" if fingerprint else "tcp") or not host or not (
            re.fullmatch(r"[0-9]{1,5}", port) and int(port) <= 65535):
        raise InvalidInput(f"address {address!r}: write unix:PATH or tcp:HOST:PORT")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=HANDSHAKE_S)


def _encrypted(sock: socket.socket, address: str) -> Encryption | None:
    """Runs the TLS handshake if the address says so.

    Raises:
        AccessError: the other side shows another certificate than the address names.
        OSError: it does not speak TLS, or the connection broke or timed out.
    """
    if not address.startswith("tls:"):
        return None
    encryption, received = Encryption(dialling_context()), b""
    while True:
        answer = encryption.handshake(received)
        if answer:
            sock.sendall(answer)
        if encryption.established:
            break
        if not (received := sock.recv(RECEIVE)):
            raise ConnectionResetError(0, "closed during the handshake")
    encryption.check_certificate(address.partition("#")[2])
    return encryption


def prove(connection: SocketConnection, key: bytes, job: str) -> None:
    """Runs the peer's half of the handshake (`protocol/auth.py`) on a new connection.

    Raises:
        AccessError: The other side is not a broker of this job with this key.
        OSError: The connection broke or timed out; or the broker has reset it, because too many
            peers were in the handshake.
    """
    greeting = _exactly(connection, auth.GREETING, "it is not a tangram broker")
    if greeting[: len(auth.MAGIC)] != auth.MAGIC:
        raise AccessError("what listens there is not a tangram broker of this version")
    theirs, ours = greeting[len(auth.MAGIC) :], os.urandom(auth.NONCE)
    connection.send(ours + auth.proof(key, "peer", theirs, ours, job))
    given = _exactly(connection, auth.PROOF, f"the key is wrong for job {job}")
    if not auth.proven(given, key, "broker", theirs, ours, job):
        raise AccessError(f"the broker of job {job} does not hold our key: not answering it")


def _exactly(connection: SocketConnection, size: int, refused: str) -> bytes:
    data, at = bytearray(size), 0
    while at < size:
        if not (got := connection.receive_into(memoryview(data)[at:])):
            raise AccessError(f"the broker closed the connection: {refused}")
        at += got
    return bytes(data)
