"""Encrypts one TCP connection with TLS 1.3, by Python's `ssl`.

The side that listens has a certificate of its own, made when it begins to listen
(`certificate.py`). Its address carries the certificate's fingerprint, and the address reaches the
dialling side in the access file or over a connection that is encrypted already. So the dialling
side knows whom to expect, and no authority signs anything. The mutual proof of the job's key
(`protocol/auth.py`) follows inside the encrypted connection. An attacker between the two sides
would have to show the certificate, whose private key never leaves the listening process. Unix
sockets and loopback addresses are not encrypted, since their bytes never leave the host.

`Encryption` reads and writes no socket: it turns what shall be sent into the bytes to send, and
received bytes into what they mean.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from ...errors import AccessError
from ...interrupts import InterruptibleLock
from ...protocol.frame import RECEIVE, Buffer


class Encryption:
    """One end of an encrypted connection. Any thread may call it.

    Args:
        context: the settings of TLS; with a certificate for the listening side.
        listening: whether this end accepted the connection.

    Attributes:
        established: whether the TLS handshake is over.
    """

    def __init__(self, context: ssl.SSLContext, listening: bool = False) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=listening)
        self._lock = InterruptibleLock()  # OpenSSL's object must not be used by two threads at once
        self.established = False

    def handshake(self, received: bytes = b"") -> bytes:
        """Goes on with the TLS handshake, and returns what the peer must get.

        Raises:
            OSError: the peer does not speak TLS 1.3.
        """
        with self._lock:
            if received:
                self._received.write(received)
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self.established = True
            return self._to_send.read()

    def check_certificate(self, fingerprint: str) -> None:
        """Compares the peer's certificate with the expected one.

        Args:
            fingerprint: SHA-256 of the certificate in DER form, in hexadecimal digits.

        Raises:
            AccessError: it is another certificate.
        """
        shown = fingerprint_of(self._tls.getpeercert(binary_form=True) or b"")
        if shown != fingerprint:
            raise AccessError(f"what listens there shows the certificate {shown[:16]}... instead "
                              f"of {fingerprint[:16]}...: it is not this job's broker")

    def seal(self, buffers: Iterable[Buffer]) -> bytes:
        """Returns the bytes to send for these buffers, in one piece."""
        with self._lock:
            for buffer in _joined(buffers):
                self._tls.write(buffer)
            return self._to_send.read()

    def open(self, received: bytes) -> bytes:
        """Takes received bytes, and returns what can be read by now; nothing while a record of TLS
        is incomplete.

        Raises:
            OSError: the bytes were changed on their way, or the peer has ended the encryption.
        """
        parts: list[bytes] = []
        with self._lock:
            self._received.write(received)
            with suppress(ssl.SSLWantReadError):
                while data := self._tls.read(RECEIVE):
                    parts.append(data)
                if not parts:
                    raise _ended()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def feed(self, received: bytes) -> None:
        """Takes received bytes for later calls of `read_into`."""
        with self._lock:
            self._received.write(received)

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes were received that nobody has read."""
        with self._lock:
            return bool(self._received.pending or self._tls.pending())

    def read_into(self, view: memoryview) -> int:
        """Reads into `view`, and returns how many bytes; 0 if more has to be received first.

        Raises:
            OSError: the received bytes were changed on their way, or the peer has ended the
                encryption.
        """
        with self._lock, suppress(ssl.SSLWantReadError):
            if not (got := self._tls.read(len(view), view)) and len(view):
                raise _ended()
            return int(got)
        return 0


def _ended() -> OSError:
    """Makes the error for TLS's `close_notify`, which no peer of ours sends. Every later read finds
    the end too, so whoever reads on would never wait for bytes again."""
    return ConnectionResetError(0, "the peer ended the encryption")


def _joined(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Joins neighbouring small buffers, because each one that is written makes a record of its own.
    """
    found: list[Buffer] = []
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < RECEIVE:
            small.append(buffer)
            continue
        if small:
            found.append(b"".join(small))
            small = []
        found.append(buffer)
    if small:
        found.append(b"".join(small))
    return [buffer for buffer in found if len(buffer)]  # an empty write would make an empty record


def fingerprint_of(certificate: bytes) -> str:
    """Returns the SHA-256 of a certificate in DER form, in hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


@cache
def dialling_context() -> ssl.SSLContext:
    """Returns the settings of TLS for the dialling side. No authority is trusted: the fingerprint
    of the certificate is compared (`Encryption.check_certificate`).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
