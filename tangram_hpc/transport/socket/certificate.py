"""Makes the certificate with which a listening process encrypts its TCP connections.

Each listening process makes one for itself, and its private key stays in that process's memory.
This is the only module that imports `cryptography`, and it does so when a certificate is made:
clients and workers make none, and neither does a broker that nobody reaches from another host.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import tempfile
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from .encryption import fingerprint_of

_YEARS = timedelta(days=3650)  # the fingerprint is compared and the dates are not


@dataclass(frozen=True)
class Certificate:
    """A certificate, ready for use.

    Attributes:
        context: the settings of TLS for the listening side.
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.
    """

    context: ssl.SSLContext
    fingerprint: str


def certificate_for(host: str) -> Certificate | None:
    """Returns a new certificate for a process that listens on this address; None for a loopback
    address, since what arrives there has never left the host.
    """
    return None if ipaddress.ip_address(host).is_loopback else make_certificate()


def make_certificate() -> Certificate:
    """Returns a new certificate with a key on the curve P-256. It takes some milliseconds."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tangram_hpc")])
    begin = datetime.now(timezone.utc) - timedelta(days=1)
    signed = (x509.CertificateBuilder().subject_name(name).issuer_name(name)
              .public_key(key.public_key()).serial_number(x509.random_serial_number())
              .not_valid_before(begin).not_valid_after(begin + _YEARS)
              .sign(key, hashes.SHA256()))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                            serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a connection that is made anew does the whole handshake
    _load(context, pem + signed.public_bytes(serialization.Encoding.PEM))
    return Certificate(context, fingerprint_of(signed.public_bytes(serialization.Encoding.DER)))


def address_of(host: str, port: int, certificate: Certificate | None) -> str:
    """Returns the address that others dial (`dial.py`).

    Args:
        host: a name or an address.
        port: the port.
        certificate: what the listening side shows; None if it does not encrypt.
    """
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"tcp:{shown}" if certificate is None else f"tls:{shown}#{certificate.fingerprint}"


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Gives key and certificate to the context, which takes them from a file only: this one has no
    name and is never on a disk.
    """
    try:
        fd = os.memfd_create("tangram-certificate")
    except AttributeError:  # a Python that was built against an old C library
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            fd = os.dup(file.fileno())
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
