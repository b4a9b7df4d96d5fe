"""Connects to a broker: tries its addresses in order, then runs the mutual challenge. Blocking.

An address is `unix:PATH` or `tcp:HOST:PORT`. Before the broker has proven the key, nothing but our
nonce and our proof is sent. Every failure is one line that names the address.
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
from ...storage.access import read_access
from .asyncsock import HANDSHAKE_S, tune


def dial(addresses: Sequence[str], key: bytes, job: str) -> socket.socket:
    """Returns an authenticated, blocking socket to the first address that answers.

    Args:
        addresses: `unix:PATH` or `tcp:HOST:PORT`, in the order in which they are tried.
        key: The job's secret.
        job: The job's name, which is part of the proof.

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
            prove(sock, key, job)
            sock.settimeout(None)
        except (OSError, AccessError) as error:
            sock.close()
            if isinstance(error, AccessError):
                raise
            problems.append(f"{address}: {error.strerror or error}")
            refused = False
            continue
        tune(sock)
        return sock
    nobody = BrokerUnreachable(f"job {job}: no broker answers "
                               f"({'; '.join(problems) or 'no address'})")
    nobody.refused = refused
    raise nobody


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
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not re.fullmatch(r"[0-9]{1,5}", port) or (
            int(port) > 65535):
        raise InvalidInput(f"address {address!r}: write unix:PATH or tcp:HOST:PORT")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=HANDSHAKE_S)


def prove(sock: socket.socket, key: bytes, job: str) -> None:
    """Runs the peer's half of the handshake (`protocol/auth.py`) on a connected socket.

    Raises:
        AccessError: The other side is not a broker of this job with this key.
        OSError: The connection broke or timed out.
    """
    greeting = _exactly(sock, auth.GREETING, "it is not a tangram broker")
    if greeting[: len(auth.MAGIC)] != auth.MAGIC:
        raise AccessError("what listens there is not a tangram broker of this version")
    theirs, ours = greeting[len(auth.MAGIC) :], os.urandom(auth.NONCE)
    sock.sendall(ours + auth.proof(key, "peer", theirs, ours, job))
    given = _exactly(sock, auth.PROOF, f"the key is wrong for job {job}")
    if not auth.proven(given, key, "broker", theirs, ours, job):
        raise AccessError(f"the broker of job {job} does not hold our key: not answering it")


def _exactly(sock: socket.socket, size: int, refused: str) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise AccessError(f"the broker closed the connection: {refused}")
        data += more
    return data
