"""Images of registries: a real one, with and without passwords and TLS, and one that misbehaves."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import site_authority
from helpers.image_rig import (
    HERE,
    MadeImage,
    RunningRegistry,
    digest,
    entry,
    free_port,
    index_of,
    needs_registry,
    registry,
    tar_of,
)

from tangram_hpc.cli import main
from tangram_hpc.domain.image_name import parse_image_name
from tangram_hpc.images import registry as registry_module
from tangram_hpc.images.credentials import find_credentials
from tangram_hpc.images.image_errors import ImageRefused, ImageUnavailable
from tangram_hpc.images.manifests import OCI_INDEX
from tangram_hpc.images.node_store import NodeStore
from tangram_hpc.images.pull import PulledImage, PullSettings, publish, pull
from tangram_hpc.images.registry import RegistryImage

OTHER = "linux/arm64" if HERE != "linux/arm64" else "linux/amd64"
needs_tools = pytest.mark.skipif(not (shutil.which("htpasswd") or shutil.which("openssl")),
                                 reason="openssl is not installed")
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


def made(*names: str) -> MadeImage:
    return MadeImage([tar_of(entry(name, os.urandom(3000).hex())) for name in names or ("a",)])


def get(tmp_path: Path, name: str, environ: dict[str, str] | None = None, again: bool = False,
        **settings: Any) -> PulledImage:
    settings.setdefault("store", str(tmp_path / "store"))
    return pull(name, PullSettings(**settings), environ or {}, again)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not installed")
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def test_by_tag_and_by_digest(tmp_path: Path, plain: RunningRegistry) -> None:
    image = made("a", "b")
    plain.push("some/app", image, "v1")
    for name in (f"{plain.host}/some/app:v1", f"docker://{plain.host}/some/app:v1",
                 f"{plain.host}/some/app@{image.digest}"):
        found = get(tmp_path, name)
        assert found.digest == image.digest
        assert sorted(os.listdir(found.folder)) == ["a", "b"]


@pytest.mark.parametrize("docker", [False, True])
def test_an_index_gives_this_machines_image(tmp_path: Path, plain: RunningRegistry, docker: bool
                                            ) -> None:
    mine = MadeImage([tar_of(entry("a", os.urandom(8).hex()))], docker=docker)
    other = MadeImage([tar_of(entry("b"))], offered=OTHER, docker=docker)
    for image in (mine, other):
        plain.push("multi", image, "one")
    index = index_of(other, mine)
    plain.put_manifest("multi", "v1", index, OCI_INDEX)
    for name in (f"{plain.host}/multi:v1", f"{plain.host}/multi@{digest(index)}"):
        assert get(tmp_path, name).digest == mine.digest
    plain.put_manifest("multi", "v2", index_of(other), OCI_INDEX)
    with pytest.raises(ImageRefused, match=f"there is none for {HERE}; there is {OTHER}"):
        get(tmp_path, f"{plain.host}/multi:v2")


def test_what_does_not_exist_can_never_be_used(tmp_path: Path, plain: RunningRegistry) -> None:
    plain.push("some/app", made(), "v1")
    for name in ("some/app:nope", "nope:v1", f"some/app@{digest(b'')}"):
        with pytest.raises(ImageRefused, match="does not exist in the registry"):
            get(tmp_path, f"{plain.host}/{name}")


def test_a_tag_that_moved_is_asked_for_again_only_on_request(
        tmp_path: Path, plain: RunningRegistry) -> None:
    first, second = made("first"), made("second")
    name = f"{plain.host}/moves:v1"
    plain.push("moves", first, "v1")
    job = {"job_share": str(tmp_path / "job")}
    assert get(tmp_path, name, **job).digest == first.digest
    plain.push("moves", second, "v1")
    # a job keeps to what the tag was when its first session asked, on all of its nodes
    assert get(tmp_path, name, store=str(tmp_path / "node2"), **job).digest == first.digest
    assert get(tmp_path, name).digest == second.digest
    assert get(tmp_path, name, again=True, **job).digest == second.digest
    assert get(tmp_path, name, store=str(tmp_path / "node3"), **job).digest == second.digest


def test_a_registry_that_is_away_is_not_needed_for_what_is_known(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_PAUSE_S", 0.001)
    image = made()
    with _registry_or_skip(tmp_path) as running:
        name = f"{running.host}/app:v1"
        running.push("app", image, "v1")
        get(tmp_path, name, job_share=str(tmp_path / "job"))
    assert get(tmp_path, name).digest == image.digest  # this node knows the tag
    other = {"store": str(tmp_path / "other")}
    assert get(tmp_path, name, job_share=str(tmp_path / "job"), **other).digest == image.digest
    shutil.rmtree(tmp_path / "job")
    with pytest.raises(ImageUnavailable, match=r"cannot be fetched now: .*Connection refused"):
        get(tmp_path, name, store=str(tmp_path / "third"))


@contextlib.contextmanager
def _registry_or_skip(folder: Path, **how: Any) -> Iterator[RunningRegistry]:
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not installed")
    (folder / "registry").mkdir()
    with registry(folder / "registry", **how) as running:
        yield running


def test_a_published_image_needs_no_registry(tmp_path: Path, plain: RunningRegistry) -> None:
    image = made("a", "b")
    plain.push("some/site", image, "v1")
    name, share = f"{plain.host}/some/site:v1", tmp_path / "share"
    settings = PullSettings(str(tmp_path / "login"))
    assert publish(name, str(share), settings, {}) == image.digest
    found = get(tmp_path, name, shares=(str(share),), registries=False)
    assert found.digest == image.digest and sorted(os.listdir(found.folder)) == ["a", "b"]
    assert not list(share.rglob("*.part-*")) and not list(share.rglob("*.claim"))
    os.chmod(share, 0o777)
    with pytest.raises(ImageUnavailable, match="others may write into it"):
        get(tmp_path, name, shares=(str(share),), registries=False)


def test_a_published_folder_is_whole_beside_another_one(tmp_path: Path, plain: RunningRegistry
                                                        ) -> None:
    image = made("a", "b")
    plain.push("some/site", image, "v2")
    name = f"{plain.host}/some/site:v2"
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    publish(name, old, PullSettings(str(tmp_path / "login")), {})
    publish(name, new, PullSettings(str(tmp_path / "login"), shares=(old,)), {})
    assert get(tmp_path, name, shares=(new,), registries=False).digest == image.digest


@pytest.mark.parametrize("own_store", [False, True])
def test_others_can_read_what_a_private_umask_publishes(
        tmp_path: Path, plain: RunningRegistry, own_store: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    plain.push("some/site", made("a"), "v3")
    monkeypatch.setenv("TANGRAM_IMAGE_STORE", str(tmp_path / "store") if own_store else "")
    before = os.umask(0o077)
    try:
        assert main(["image", "publish", f"{plain.host}/some/site:v3", "--into",
                     str(tmp_path / "share")]) == 0
    finally:
        os.umask(before)
    for path in [tmp_path / "share", *(tmp_path / "share").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


# ---- who one is ----


def _bcrypt(password: str) -> str:
    """The hash of a password as registries want it; empty where crypt(3) cannot make one."""
    try:
        library = ctypes.CDLL("libcrypt.so.1")
    except OSError:
        return ""
    library.crypt.restype = ctypes.c_char_p
    made: bytes | None = library.crypt(password.encode(), b"$2b$04$" + b"abcdefghijklmnopqrstuu")
    return made.decode() if made and made.startswith(b"$2b$") else ""


@needs_registry
@pytest.mark.skipif(not _bcrypt("x"), reason="this system's crypt(3) has no bcrypt")
def test_a_password_of_the_users_own_file(tmp_path: Path) -> None:
    words = tmp_path / "htpasswd"
    words.write_text(f"me:{_bcrypt('secret')}\n")
    image = made()
    with _registry_or_skip(tmp_path, htpasswd=str(words), user="me", password="secret") as running:
        running.push("private", image, "v1")
        name = f"{running.host}/private:v1"
        with pytest.raises(ImageRefused, match="may not be read without credentials; log in with"):
            get(tmp_path, name)
        auth = tmp_path / "auth.json"
        for password, good in (("wrong", False), ("secret", True)):
            both = base64.b64encode(f"me:{password}".encode()).decode()
            auth.write_text(json.dumps({"auths": {running.host: {"auth": both}}}))
            environ = {"REGISTRY_AUTH_FILE": str(auth)}
            if good:
                assert get(tmp_path, name, environ).digest == image.digest
            else:
                with pytest.raises(ImageRefused, match=f"with the credentials of {auth}") as told:
                    get(tmp_path, name, environ)
                assert "wrong" not in str(told.value)


@needs_registry
@needs_tools
def test_tls_with_an_authority_of_the_sites_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    image = made()
    with _registry_or_skip(tmp_path, tls=(str(cert), str(key), str(cert))) as running:
        running.push("app", image, "v1")
        name = f"{running.host}/app:v1"
        with pytest.raises(ImageRefused, match=r"certificate of the registry .* is not trusted"):
            get(tmp_path, name)
        folder = tmp_path / ".config/containers/certs.d" / running.host
        folder.mkdir(parents=True)
        shutil.copy(cert, folder / "ca.crt")
        assert get(tmp_path, name, {"HOME": str(tmp_path)}).digest == image.digest


@needs_openssl
def test_an_authority_without_key_usage_is_trusted_by_each_python(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    made = site_authority.make(tmp_path)
    site_authority.strict(monkeypatch)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.socket = made.server_context().wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            host = f"127.0.0.1:{server.server_address[1]}"
            with pytest.raises(ImageRefused, match=r"certificate of the registry .* not trusted"):
                get(tmp_path, f"{host}/app:v1")
            folder = tmp_path / ".config/containers/certs.d" / host
            folder.mkdir(parents=True)
            shutil.copy(made.authority, folder / "ca.crt")
            with pytest.raises(ImageRefused, match="does not exist in the registry"):
                get(tmp_path, f"{host}/app:v1", {"HOME": str(tmp_path)})
        finally:
            server.shutdown()


@pytest.mark.parametrize("files, found", [
    ({}, None),
    ({"auth": {"reg.example": "a:1"}}, "a"),
    ({"auth": {"https://reg.example/v2/": "a:1"}}, "a"),
    ({"auth": {"reg.example": "a:1", "reg.example/some": "b:2", "reg.example/other": "c:3"}}, "b"),
    ({"run": {"reg.example": "a:1"}, "docker": {"reg.example": "b:2"}}, "a"),
    ({"docker": {"reg.example": "b:2"}}, "b"),
    ({"auth": {"other.example": "a:1"}, "docker": {"reg.example": "b:2"}}, "b"),
    ({"auth": {"reg.example:5000": "a:1"}}, None),
])
def test_which_credentials_are_taken(tmp_path: Path, files: dict[str, dict[str, str]],
                                     found: str | None) -> None:
    places = {"auth": "auth.json", "run": "run/containers/auth.json",
              "docker": ".docker/config.json"}
    for kind, auths in files.items():
        path = tmp_path / places[kind]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"auths": {
            host: {"auth": base64.b64encode(both.encode()).decode()}
            for host, both in auths.items()}}))
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run"),
               "REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")}
    got = find_credentials(environ, "reg.example", "some/app")
    assert (got.user if got else None) == found
    assert "1" not in repr(got).replace(str(tmp_path), "") and "password" not in repr(got)


def test_dockers_own_registry_has_its_old_name_in_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {
        "https://index.docker.io/v1/": {"identitytoken": "t"}}}))
    got = find_credentials({"DOCKER_CONFIG": str(tmp_path)}, "docker.io", "library/ubuntu")
    assert got is not None and got.refresh_token == "t"


@pytest.mark.parametrize("text", ["{", "[]x", '{"auths": {"reg.example": {"auth": "***"}}}'])
def test_a_damaged_file_of_credentials_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ImageRefused, match=r"a.json"):
        find_credentials({"REGISTRY_AUTH_FILE": str(tmp_path / "a.json")}, "reg.example", "app")


PROGRAM = """#!/bin/sh
read server
echo "$1 $server" >>"$HOME/asked"
case $server in
  reg.example) echo '{"Username": "kept", "Secret": "word"}' ;;
  token.example) echo '{"Username": "<token>", "Secret": "word"}' ;;
  https://index.docker.io/v1/) echo '{"Username": "hub", "Secret": "word"}' ;;
  broken.example) echo no keyring; exit 1 ;;
  odd.example) echo '[]' ;;
  *) echo credentials not found in native keychain; exit 1 ;;
esac
"""


def asked(tmp_path: Path, registry: str, **config: Any) -> Any:
    """The credentials for a registry with a configuration and a program `docker-credential-p`."""
    (tmp_path / "docker-credential-p").write_text(PROGRAM)
    (tmp_path / "docker-credential-p").chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return find_credentials({"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path),
                             "PATH": f"{tmp_path}:/usr/bin:/bin"}, registry, "app")


def test_programs_that_keep_credentials_are_asked(tmp_path: Path) -> None:
    entries = {"auths": {"reg.example": {"auth": base64.b64encode(b"file:1").decode()},
                         "other.example": {"username": "file", "password": "1"}}}
    for config, host, user in (
            ({"credsStore": "p", "auths": {"reg.example": {}}}, "reg.example", "kept"),
            ({"credHelpers": {"https://reg.example": "p"}, **entries}, "reg.example", "kept"),
            ({"credsStore": "p", **entries}, "reg.example", "file"),
            ({"credsStore": "p", **entries}, "other.example", "file"),
            ({"credHelpers": {"other.example": "p"}, **entries}, "other.example", "file"),
            ({"credHelpers": {"reg.example": "p"}}, "third.example", None),
            ({"credsStore": "p"}, "third.example", None),
            ({"credsStore": "p"}, "docker.io", "hub")):
        got = asked(tmp_path, host, **config)
        assert (got.user if got else None) == user, (config, host)
        assert "word" not in repr(got)
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"get {name}" for name in ("reg.example", "reg.example", "other.example", "third.example",
                                   "https://index.docker.io/v1/")]
    got = asked(tmp_path, "token.example", credsStore="p")
    assert (got.refresh_token, got.user, got.source) == ("word", "", "docker-credential-p")


@pytest.mark.parametrize("registry, program, words", [
    ("broken.example", "p", "docker-credential-p, which .*config.json names, has failed: no keyr"),
    ("odd.example", "p", "gave no user and secret"), ("reg.example", "../p", "names no program by"),
    ("reg.example", "absent", "docker-credential-absent, .* cannot be used .*; install it")])
def test_a_program_that_fails_is_named(tmp_path: Path, registry: str, program: str, words: str
                                       ) -> None:
    kind = ImageUnavailable if "has failed" in words else ImageRefused  # a keyring may be unlocked
    with pytest.raises(kind, match=words) as told:
        asked(tmp_path, registry, credHelpers={registry: program})
    assert "word" not in str(told.value)


def test_a_store_of_another_machine_keeps_no_public_image_away(tmp_path: Path) -> None:
    """A copied file names a program that is not installed here."""
    assert asked(tmp_path, "reg.example", credsStore="absent") is None


# ---- registries that misbehave ----


class Odd:
    """A registry made for one test: it serves an image, after what a test wants to go wrong."""

    def __init__(self, image: MadeImage) -> None:
        self.image, self.seen = image, []  # type: ignore[var-annotated]
        self.before: list[Any] = []  # functions that may answer instead, each once
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                outer.seen.append((self.path, dict(self.headers)))
                for one in outer.before:
                    if one(self):
                        outer.before.remove(one)
                        return
                outer.serve(self)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"

    def serve(self, request: Any) -> None:
        last = request.path.rsplit("/", 1)[-1]
        known = {**self.image.blobs, "v1": self.image.manifest,
                 self.image.digest: self.image.manifest}
        data = known.get(last, b"")
        if start := request.headers.get("Range", ""):
            data = data[int(start.removeprefix("bytes=").removesuffix("-")):]
        say(request, 206 if start else 200 if data else 404, data)


def say(request: Any, status: int, data: bytes = b"", **headers: str) -> bool:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)
    return True


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Odd]:
    monkeypatch.setattr(registry_module, "_PAUSE_S", 0.001)
    running = Odd(made("a"))
    thread = threading.Thread(target=running.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join()


def is_blob(request: Any) -> bool:
    return "/blobs/" in request.path


def test_errors_that_pass_are_waited_out(tmp_path: Path, odd: Odd) -> None:
    odd.before = [lambda r: "manifests" in r.path and say(r, 503),
                  lambda r: "manifests" in r.path and say(r, 429, Retry_After="0"),
                  lambda r: is_blob(r) and say(r, 500)]
    assert get(tmp_path, f"{odd.host}/app:v1").digest == odd.image.digest


def test_errors_that_stay_are_told_as_not_now(tmp_path: Path, odd: Odd) -> None:
    odd.before = [lambda r: "manifests" in r.path and say(r, 503) for _ in range(9)]
    with pytest.raises(ImageUnavailable, match=r"app:v1 cannot be fetched now: .*503"):
        get(tmp_path, f"{odd.host}/app:v1")


def test_layers_that_are_ready_wait_for_the_next_attempt(tmp_path: Path, odd: Odd) -> None:
    odd.image = made("a", "b")
    last = list(odd.image.blobs)[-1]
    odd.before = [lambda r: r.path.endswith(last) and say(r, 503) for _ in range(9)]
    with pytest.raises(ImageUnavailable, match=r"cannot be fetched now: .*503"):
        get(tmp_path, f"{odd.host}/app:v1")
    assert len(NodeStore(tmp_path / "store").layer_sizes()) == 1
    odd.before = []
    assert get(tmp_path, f"{odd.host}/app:v1").digest == odd.image.digest


def test_a_blob_goes_on_where_it_stopped(tmp_path: Path, odd: Odd) -> None:
    def half(request: Any) -> bool:
        if not is_blob(request) or request.headers.get("Range"):
            return False
        data = odd.image.blobs[request.path.rsplit("/", 1)[-1]]
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2])
        request.close_connection = True
        return True

    odd.before = [half, half]
    assert get(tmp_path, f"{odd.host}/app:v1").digest == odd.image.digest
    assert any(headers.get("Range", "").startswith("bytes=") for _, headers in odd.seen)


def test_a_registry_that_cannot_go_on_begins_anew(tmp_path: Path, odd: Odd) -> None:
    def half(request: Any) -> bool:
        if not is_blob(request):
            return False
        data = odd.image.blobs[request.path.rsplit("/", 1)[-1]]
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2])
        request.close_connection = True
        return True

    def whole(request: Any) -> bool:
        return is_blob(request) and bool(request.headers.get("Range")) and say(
            request, 200, odd.image.blobs[request.path.rsplit("/", 1)[-1]])

    odd.before = [whole, half]
    assert get(tmp_path, f"{odd.host}/app:v1").digest == odd.image.digest


@pytest.mark.parametrize("change, why", [
    (lambda data: b"x" * len(data), "gave other bytes for the blob"),
    (lambda data: data + b"more", "is larger than the")])
def test_wrong_bytes_are_refused(tmp_path: Path, odd: Odd, change: Any, why: str) -> None:
    def wrong(request: Any) -> bool:
        return is_blob(request) and say(
            request, 200, change(odd.image.blobs[request.path.rsplit("/", 1)[-1]]))

    odd.before = [wrong]
    with pytest.raises(ImageRefused, match=why):
        get(tmp_path, f"{odd.host}/app:v1")
    assert not list((tmp_path / "store/images").iterdir())


def test_another_manifest_than_was_asked_for_is_refused(tmp_path: Path, odd: Odd) -> None:
    odd.before = [lambda r: "manifests" in r.path and say(r, 200, made().manifest)]
    with pytest.raises(ImageRefused, match="gave a manifest with the digest"):
        get(tmp_path, f"{odd.host}/app@{odd.image.digest}")


def test_a_huge_manifest_is_not_read(tmp_path: Path, odd: Odd) -> None:
    odd.before = [lambda r: "manifests" in r.path and say(r, 200, b" " * (5 << 20))]
    with pytest.raises(ImageRefused, match=r"manifest of .* has more than 4194304 bytes"):
        get(tmp_path, f"{odd.host}/app:v1")


@pytest.mark.attack("network", "keys")
@pytest.mark.attack("repository", "keys")
def test_a_token_is_fetched_and_stays_with_its_registry(tmp_path: Path, odd: Odd) -> None:
    """Bearer: the challenge names a service, which gives a token for the user's password. Neither
    follows a redirect to another host."""
    elsewhere = Odd(odd.image)
    thread = threading.Thread(target=elsewhere.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def guard(request: Any) -> bool:
        if request.path.startswith("/token"):
            return say(request, 200, b'{"token": "granted"}')
        if request.headers.get("Authorization") != "Bearer granted":
            return say(request, 401, WWW_Authenticate=(
                f'Bearer realm="http://{odd.host}/token",service="svc"'))
        if is_blob(request):
            return say(request, 307, Location=f"http://{elsewhere.host}{request.path}")
        return False

    class Always(list):  # type: ignore[type-arg]
        def remove(self, _: object) -> None:
            pass

    odd.before = Always([guard])
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {odd.host: {
        "auth": base64.b64encode(b"me:secret").decode()}}}))
    try:
        found = get(tmp_path, f"{odd.host}/app:v1",
                    {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")})
    finally:
        elsewhere.server.shutdown()
        elsewhere.server.server_close()
        thread.join()
    assert found.digest == odd.image.digest
    (asked,) = [(path, headers) for path, headers in odd.seen if path.startswith("/token")]
    assert "scope=repository%3Aapp%3Apull" in asked[0] and "service=svc" in asked[0]
    assert base64.b64decode(asked[1]["Authorization"].split()[1]) == b"me:secret"
    assert elsewhere.seen and not any("Authorization" in headers for _, headers in elsewhere.seen)


@pytest.mark.attack("network", "keys")
@pytest.mark.attack("repository", "keys")
def test_a_host_of_a_redirect_cannot_ask_for_credentials(tmp_path: Path, odd: Odd) -> None:
    """Only the registry itself may name the token service that gets the user's password."""
    elsewhere = Odd(odd.image)
    thread = threading.Thread(target=elsewhere.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    odd.before = [lambda r: is_blob(r) and say(
        r, 307, Location=f"http://{elsewhere.host}{r.path}")]
    elsewhere.before = [lambda r: is_blob(r) and say(r, 401, WWW_Authenticate=(
        f'Bearer realm="http://{elsewhere.host}/token",service="svc"'))]
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {odd.host: {
        "auth": base64.b64encode(b"me:secret").decode()}}}))
    try:
        with pytest.raises(ImageRefused, match=f"redirects to {elsewhere.host}, which demands"):
            get(tmp_path, f"{odd.host}/app:v1",
                {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")})
    finally:
        elsewhere.server.shutdown()
        elsewhere.server.server_close()
        thread.join()
    assert [path for path, _ in elsewhere.seen] == [f"/v2/app/blobs/{digest(odd.image.config)}"]
    assert not any("Authorization" in headers for _, headers in elsewhere.seen)


def test_a_redirect_to_a_file_or_in_circles_ends(tmp_path: Path, odd: Odd) -> None:
    odd.before = [lambda r: is_blob(r) and say(r, 302, Location="file:///etc/passwd")]
    with pytest.raises((ImageRefused, ImageUnavailable)):
        get(tmp_path, f"{odd.host}/app:v1")
    odd.before = [lambda r: is_blob(r) and say(r, 302, Location=r.path) for _ in range(40)]
    with pytest.raises((ImageRefused, ImageUnavailable)):
        get(tmp_path, f"{odd.host}/app:v1")


@pytest.mark.attack("network", "keys")
def test_a_registry_elsewhere_must_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the loopback, and what a setting names, may be spoken to in the clear."""
    name = parse_image_name("registry.invalid/app:v1")
    assert RegistryImage(name, {})._find_scheme() == "https"
    assert RegistryImage(name, {}, ("registry.invalid",))._plain
    assert not RegistryImage(name, {}, ("other.invalid",))._plain
    for host, loopback in (("localhost:5000", True), ("127.0.0.2", True), ("[::1]:5000", True),
                           ("127.0.0.1.example.org", False), ("10.0.0.1:5000", False)):
        assert registry_module._is_loopback(host) is loopback
