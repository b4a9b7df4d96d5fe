"""Fetches manifests and blobs of one image from a registry, by the registry protocol of OCI.

Python's own HTTP is used, so that an installation without extras can fetch images. A request is
repeated when the registry does not answer or answers 429 or 5xx, and a blob goes on where it
stopped. Every manifest and every blob is compared with its digest.

Connections are encrypted and verified by the system's certificates, and those in the `certs.d`
folders of containers and Docker. Only registries on the loopback, and those that a setting names,
are used without encryption. Credentials go to the registry and to the token service that it names,
but not to a host to which these redirect.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import http.client
import ipaddress
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..domain.image_name import DEFAULT_REGISTRY, ImageName
from .credentials import RegistryCredentials, find_credentials
from .image_errors import ImageRefused, RegistryUnavailable, of_os_error
from .image_limits import MANIFEST_MAX
from .manifests import ACCEPTED, BlobRef, digest_of

_SILENT_S = 30.0  # seconds without a byte after which a connection is given up
_ATTEMPTS = 5
_PAUSE_S = 0.5  # before the second attempt; it doubles each time
_PAUSE_MAX_S = 20.0
_PIECE = 1 << 18
_TOKEN_MAX = 1 << 16
_HUB_API = "registry-1.docker.io"
_CERTS = ("/etc/containers/certs.d", "/etc/docker/certs.d")
_FAILED = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, OSError)

HttpAnswer = Any  # http.client.HTTPResponse, or what urllib wraps it into


class RegistryImage:
    """One image in its registry.

    Args:
        name: the image.
        environ: the user's environment, for credentials and proxies.
        insecure: registries besides those on the loopback that may be spoken to without encryption.
    """

    def __init__(self, name: ImageName, environ: Mapping[str, str],
                 insecure: Sequence[str] = ()) -> None:
        self._name, self._environ = name, environ
        self._host = _HUB_API if name.registry == DEFAULT_REGISTRY else name.registry
        self._plain = name.registry in insecure or _is_loopback(self._host)
        self._credentials: RegistryCredentials | None = None
        self._asked_credentials = False
        self._authorization = ""
        self._scheme = ""
        self._opener: urllib.request.OpenerDirector | None = None

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Returns a manifest or an index, and its digest.

        Args:
            reference: a tag or a digest.

        Raises:
            ImageRefused: there is none, it may not be read, or it has another digest.
            ImageUnavailable: the registry does not answer.
        """
        headers = {"Accept": ", ".join(ACCEPTED)}

        def fetch() -> bytes:
            with self._get(f"manifests/{reference}", headers) as answer:
                data: bytes = answer.read(MANIFEST_MAX + 1)
                return data

        data = self._repeated(fetch)
        if len(data) > MANIFEST_MAX:
            raise ImageRefused(f"image: the manifest of {self._name.full} has more than "
                               f"{MANIFEST_MAX} bytes")
        digest = digest_of(data)
        if reference.startswith("sha256:") and digest != reference:
            raise ImageRefused(f"image: the registry {self._name.registry} gave a manifest with "
                               f"the digest {digest} for {reference}")
        return data, digest

    def blob(self, blob: BlobRef, file: IO[bytes]) -> None:
        """Writes a blob into an empty file.

        Raises:
            ImageRefused: it has another size or digest, or does not exist.
            ImageUnavailable: the registry does not answer; or the disk is full.
        """
        digest, done = hashlib.sha256(), 0

        def fetch() -> None:
            nonlocal digest, done
            headers = {"Range": f"bytes={done}-"} if done else {}
            with self._get(f"blobs/{blob.digest}", headers) as answer:
                if done and answer.status != 206:  # the registry ignores Range: whole blob follows
                    digest, done = hashlib.sha256(), 0
                    file.seek(0)
                    file.truncate()
                while piece := answer.read(_PIECE):
                    done += len(piece)
                    if done > blob.size:
                        raise ImageRefused(f"image: the blob {blob.digest} is larger than the "
                                           f"{blob.size} bytes that the manifest says")
                    digest.update(piece)
                    try:
                        file.write(piece)
                    except OSError as error:
                        raise of_os_error("a blob cannot be written", error) from None
                if done < blob.size:
                    raise http.client.IncompleteRead(b"", blob.size - done)

        if blob.size:
            self._repeated(fetch, lambda: done)
        if f"sha256:{digest.hexdigest()}" != blob.digest:
            raise ImageRefused(f"image: the registry {self._name.registry} gave other bytes for "
                               f"the blob {blob.digest}")

    # ---- requests ----

    def _repeated(self, call: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
        """Calls until it succeeds, or has failed several times in a row without any progress."""
        failures, before, pause = 0, 0, _PAUSE_S
        while True:
            try:
                return call()
            except urllib.error.HTTPError as error:
                self._judge(error)
                wait, why = _retry_after(error), f"it answers {error.code} {error.reason}"
            except _FAILED as error:
                wait, why = 0.0, _why(error)
                if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
                    raise ImageRefused(
                        f"image: the certificate of the registry {self._name.registry} is not "
                        f"trusted ({why}); add its authority to the system's, or as "
                        f"{_CERTS[0]}/{self._host}/ca.crt") from None
            failures = failures + 1 if progress() == before else 1
            before = progress()
            if failures >= _ATTEMPTS:
                raise RegistryUnavailable(
                    f"image: {self._name.full} cannot be fetched now: the registry "
                    f"{self._name.registry} does not serve it ({why})")
            time.sleep(min(_PAUSE_MAX_S, max(pause, wait)))
            pause *= 2

    def _judge(self, error: urllib.error.HTTPError) -> None:
        """Raises ImageRefused if another attempt would fail in the same way."""
        code, name = error.code, self._name
        error.close()
        if code in (401, 403):
            who = (f"with the credentials of {self._credentials.source}" if self._credentials
                   else "without credentials")
            raise ImageRefused(f"image: {name.full} may not be read {who}; log in with `podman "
                               f"login {name.registry}` or `docker login {name.registry}`, if it "
                               "exists")
        if code == 404:
            raise ImageRefused(f"image: {name.full} does not exist in the registry "
                               f"{name.registry}")
        if code < 500 and code not in (408, 425, 429):
            raise ImageRefused(f"image: {name.full} is refused by the registry {name.registry} "
                               f"({code} {error.reason})")

    def _get(self, path: str, headers: Mapping[str, str]) -> HttpAnswer:
        """Sends a GET to the registry, with the user's credentials if the registry demands them."""
        if not self._scheme:
            self._scheme = self._find_scheme()
        where = f"{self._scheme}://{self._host}/v2/{self._name.repository}/{path}"
        try:
            return self._open(where, headers, self._authorization)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            challenge = error.headers.get("WWW-Authenticate", "")
            error.close()
            asker = urllib.parse.urlsplit(error.geturl()).netloc
            if asker.lower() != self._host.lower():
                raise ImageRefused(f"image: the registry {self._name.registry} redirects to "
                                   f"{asker}, which demands credentials; only the registry itself "
                                   "may ask for them") from None
        self._authorization = self._authorize(challenge)
        return self._open(where, headers, self._authorization)

    def _open(self, where: str, headers: Mapping[str, str], authorization: str = "",
              body: bytes | None = None) -> HttpAnswer:
        request = urllib.request.Request(where, body, {"User-Agent": "tangram_hpc", **headers})
        if authorization:
            request.add_unredirected_header("Authorization", authorization)
        if self._opener is None:  # to read the system's certificates takes a while
            self._opener = _opener(self._host, self._environ, self._plain)
        return self._opener.open(request, timeout=_SILENT_S)

    def _find_scheme(self) -> str:
        if not self._plain:
            return "https"
        try:
            self._open(f"https://{self._host}/v2/", {}).close()
        except urllib.error.HTTPError as error:
            error.close()
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise
            if isinstance(error.reason, ssl.SSLError | ConnectionResetError):
                return "http"
            raise
        except http.client.HTTPException:
            return "http"
        return "https"

    # ---- who asks ----

    def _authorize(self, challenge: str) -> str:
        """Returns the header that answers a registry's challenge."""
        if not self._asked_credentials:
            self._asked_credentials = True
            self._credentials = find_credentials(self._environ, self._name.registry,
                                                 self._name.repository)
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return _basic(self._credentials)
        if scheme.lower() != "bearer":
            raise ImageRefused(f"image: the registry {self._name.registry} asks for "
                               f"authentication by {scheme!r}; supported are basic and bearer")
        fields = dict(re.findall(r'([a-zA-Z_]+)="([^"]*)"', rest))
        realm = fields.get("realm", "")
        url = urllib.parse.urlsplit(realm)
        if url.scheme != "https" and not (url.scheme == "http" and self._plain):
            raise ImageRefused(f"image: the registry {self._name.registry} names a token service "
                               "without encryption")
        scope = fields.get("scope") or f"repository:{self._name.repository}:pull"
        return f"Bearer {self._token(realm, fields.get('service', ''), scope)}"

    def _token(self, realm: str, service: str, scope: str) -> str:
        query, body, proof = {"service": service, "scope": scope}, None, ""
        if self._credentials is not None and self._credentials.refresh_token:
            query |= {"grant_type": "refresh_token", "client_id": "tangram_hpc",
                      "refresh_token": self._credentials.refresh_token}
            body = urllib.parse.urlencode(query).encode()
            where = realm
        else:
            proof = _basic(self._credentials)
            where = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(query)}"
        with self._open(where, {}, proof, body) as answer:
            data = answer.read(_TOKEN_MAX)
        try:
            record = json.loads(data)
            token = record.get("token") or record.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not token.isprintable():
            raise ImageRefused(f"image: the token service of the registry {self._name.registry} "
                               "gave no token")
        return token


def _basic(credentials: RegistryCredentials | None) -> str:
    if credentials is None or not credentials.user:
        return ""
    both = f"{credentials.user}:{credentials.password}".encode()
    return f"Basic {base64.b64encode(both).decode()}"


def _is_loopback(host: str) -> bool:
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _opener(host: str, environ: Mapping[str, str], plain: bool) -> urllib.request.OpenerDirector:
    folders = [*_CERTS]
    if home := environ.get("HOME"):
        folders.insert(0, f"{home}/.config/containers/certs.d")
    own = [path for folder in folders for path in sorted(Path(folder, host).glob("*.crt"))]
    context = _context() if own else _system_context()
    for path in own:
        context.load_verify_locations(path)
    proxy = urllib.request.ProxyHandler({} if _is_loopback(host) else None)
    return urllib.request.build_opener(
        proxy, urllib.request.HTTPSHandler(context=context), _Redirect(plain))


@functools.cache
def _system_context() -> ssl.SSLContext:
    """The system's certificates, which take a tenth of a second to read."""
    return _context()


def _context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    # From Python 3.13 on an authority needs critical basic constraints and a key usage. Those that
    # sites make, as by Harbor's manual, often lack them, and container tools ask for neither.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from an encrypted connection to one that is not."""

    max_redirections = 5

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
                         headers: Any, newurl: str) -> urllib.request.Request | None:
        """Returns the request to the new place."""
        fresh = super().redirect_request(req, fp, code, msg, headers, newurl)
        if fresh is None:
            return None
        if fresh.type != "https" and not (self._plain and req.type == "http"):
            raise ImageRefused("image: its registry redirects to a place without encryption")
        if fresh.host == req.host and fresh.type == req.type:
            for name, value in req.unredirected_hdrs.items():
                fresh.add_unredirected_header(name, value)
        return fresh


def _retry_after(error: urllib.error.HTTPError) -> float:
    text = error.headers.get("Retry-After", "") if error.headers else ""
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _why(error: BaseException) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"no answer for {_SILENT_S:g} s"
    if isinstance(reason, OSError) and reason.errno and reason.strerror:
        return os.strerror(reason.errno) if reason.errno > 0 else str(reason.strerror)
    return " ".join(str(reason).split())[:200] or type(error).__name__
