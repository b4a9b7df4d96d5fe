"""Owns: a certificate of a server on 127.0.0.1, signed by an authority as sites make theirs. Must
not know who is served.

The authority has no key usage, as one that is made by the commands of Harbor's manual and of most
others, so that it passes only where VERIFY_X509_STRICT is not set. `create_default_context` sets it
from Python 3.13 on; `strict` does so with any Python.
"""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_ALT = "subjectAltName=IP:127.0.0.1"


class SiteCertificate(NamedTuple):
    """Files in PEM: the authority's certificate, the server's certificate and its key."""

    authority: Path
    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """What a server needs to show the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make(folder: Path) -> SiteCertificate:
    """Makes them in a folder by the program openssl."""
    ca, ca_key, cert, key = (folder / name for name in ("ca.crt", "ca.key", "site.crt", "site.key"))
    asked, more = folder / "site.csr", folder / "site.ext"
    more.write_text(_ALT)
    for words in (
            ("req", "-x509", *_EC, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj",
             "/CN=an authority of a site"),
            ("req", "-new", *_EC, "-keyout", key, "-out", asked, "-subj", "/CN=127.0.0.1"),
            ("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", ca_key, "-set_serial", "1",
             "-days", "2", "-extfile", more, "-out", cert)):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    return SiteCertificate(ca, cert, key)


def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `ssl.create_default_context` as strict as from Python 3.13 on."""
    real = ssl.create_default_context

    def create(*args: Any, **options: Any) -> ssl.SSLContext:
        context = real(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create)
