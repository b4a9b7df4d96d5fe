"""Makes images of every kind without a tool: layers, OCI layouts, archives of `docker save`, and
`.sif` files; and runs a real registry, with or without a password and TLS.

A `Layer` is a list of tar entries. `programs()` are the entries of a root file system in which a
shell runs: this machine's own `sh` and a few programs, with their libraries.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.images.manifests import (
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    platform_of,
)

HERE = platform_of(platform.machine())
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
Entry = tuple[tarfile.TarInfo, bytes]

needs_registry = pytest.mark.skipif(
    not shutil.which("docker-registry"), reason="docker-registry is not installed")
needs_squashfs = pytest.mark.skipif(
    not (shutil.which("mksquashfs") and shutil.which("unsquashfs")),
    reason="squashfs-tools is not installed")


def entry(name: str, data: bytes | str = b"", kind: bytes = tarfile.REGTYPE, **about: Any) -> Entry:
    """One entry of a layer."""
    content = data.encode() if isinstance(data, str) else data
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in about.items():
        setattr(info, key, value)
    return info, content


def folder(name: str, **about: Any) -> Entry:
    return entry(name, kind=tarfile.DIRTYPE, **about)


def link(name: str, target: str) -> Entry:
    return entry(name, kind=tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> Entry:
    return entry(name, kind=tarfile.LNKTYPE, linkname=target)


def tar_of(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    """The tar of these entries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@cache
def programs() -> tuple[Entry, ...]:
    """A root file system in which `sh`, `cat`, `ls`, `id` and `env` run."""
    paths: dict[str, None] = {}
    for name in ("sh", "cat", "ls", "id", "env", "sleep"):
        path = shutil.which(name)
        assert path is not None
        paths[os.path.realpath(path)] = None
        for found in re.findall(r"(/\S+) \(0x", subprocess.run(
                ["ldd", path], capture_output=True, text=True, check=True).stdout):
            paths[found] = None
    made: dict[str, Entry] = {name: folder(name) for name in (
        "bin", "etc", "tmp", "proc", "dev", "session", "usr", "usr/bin")}
    files: dict[tuple[int, int], str] = {}  # those of uutils (Ubuntu 26.04) are one of 11 MB
    for path in paths:
        name, about = path.lstrip("/"), os.stat(path)
        first = files.setdefault((about.st_dev, about.st_ino), name)
        made[name] = (entry(name, Path(path).read_bytes(), mode=0o755) if first == name
                      else link(name, f"/{first}"))
    for name in ("sh", "cat", "ls", "id", "env", "sleep"):
        real = os.path.realpath(shutil.which(name) or "")
        if f"bin/{name}" not in made:
            made[f"bin/{name}"] = link(f"bin/{name}", real)
    return tuple(made.values())


def libraries(path: str) -> list[Entry]:
    """Returns the libraries of a program of this machine."""
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    return [entry(name.lstrip("/"), Path(name).read_bytes(), mode=0o755)
            for name in re.findall(r"(/\S+) \(0x", told)]


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class MadeImage:
    """An image of some layers, as blobs.

    Attributes:
        layers: the uncompressed tars, the lowest first.
        env: its variables.
        offered: the platform that the image is for.
        docker: whether its manifest is of Docker's kind.
        inner: further fields of its configuration about programs, such as `WorkingDir`.
    """

    layers: Sequence[bytes]
    env: Sequence[str] = ()
    offered: str = HERE
    docker: bool = False
    inner: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        system, _, machine = self.offered.partition("/")
        self.diff_ids = [digest(layer) for layer in self.layers]
        self.config = json.dumps({
            "os": system, "architecture": machine,
            "config": {"Env": list(self.env), **self.inner},
            "rootfs": {"type": "layers", "diff_ids": self.diff_ids}}).encode()
        packed = [gzip.compress(layer, 1, mtime=0) for layer in self.layers]
        kind = DOCKER_MANIFEST if self.docker else OCI_MANIFEST
        self.manifest = json.dumps({
            "schemaVersion": 2, "mediaType": kind,
            "config": self.describe(self.config, "application/vnd.oci.image.config.v1+json"),
            "layers": [self.describe(layer, LAYER) for layer in packed]}).encode()
        self.kind = kind
        self.blobs.update({digest(data): data for data in (self.config, *packed)})

    @staticmethod
    def describe(data: bytes, kind: str) -> dict[str, Any]:
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    @property
    def digest(self) -> str:
        return digest(self.manifest)

    def layout(self, path: Path, name: str = "") -> Path:
        """Writes an OCI layout, or adds to one."""
        (path / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        for key, data in {**self.blobs, self.digest: self.manifest}.items():
            (path / "blobs" / key.replace(":", "/")).write_bytes(data)
        index = path / "index.json"
        known = json.loads(index.read_text())["manifests"] if index.exists() else []
        notes = {"annotations": {"org.opencontainers.image.ref.name": name}} if name else {}
        system, _, machine = self.offered.partition("/")
        known.append({**self.describe(self.manifest, self.kind), **notes,
                      "platform": {"os": system, "architecture": machine}})
        index.write_text(json.dumps({"schemaVersion": 2, "manifests": known}))
        return path

    def oci_archive(self, path: Path, name: str = "") -> Path:
        """Writes a tar of an OCI layout."""
        layout = self.layout(path.with_suffix(".layout"), name)
        with tarfile.open(path, "w") as tar:
            for file in sorted(layout.rglob("*")):
                if file.is_file():
                    tar.add(file, str(file.relative_to(layout)))
        return path

    def docker_archive(self, path: Path, *tags: str) -> Path:
        """Writes what `docker save` would."""
        entries = [entry(f"{n}/layer.tar", layer) for n, layer in enumerate(self.layers)]
        entries.append(entry("config.json", self.config))
        entries.append(entry("manifest.json", json.dumps([{
            "Config": "config.json", "RepoTags": list(tags),
            "Layers": [f"{n}/layer.tar" for n in range(len(self.layers))]}])))
        path.write_bytes(tar_of(*entries))
        return path


def small(*more: Entry, env: Sequence[str] = (), **inner: Any) -> MadeImage:
    """An image in which a shell runs, with more entries in a second layer."""
    return MadeImage([tar_of(*programs()), tar_of(entry("etc/hello", "hi\n"), *more)], env,
                     inner=inner)


def index_of(*images: MadeImage) -> bytes:
    """An index of images for several platforms."""
    entries = []
    for image in images:
        system, _, machine = image.offered.partition("/")
        entries.append({**image.describe(image.manifest, image.kind),
                        "platform": {"os": system, "architecture": machine}})
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()


def skopeo_folder(path: Path, *images: MadeImage) -> Path:
    """Writes a folder as `skopeo copy` to `dir:` does; with `--all` if there are several images."""
    path.mkdir()
    (path / "version").write_text("Directory Transport Version: 1.1\n")
    for image in images:
        for key, data in image.blobs.items():
            (path / key.removeprefix("sha256:")).write_bytes(data)
        (path / f"{image.digest.removeprefix('sha256:')}.manifest.json").write_bytes(image.manifest)
    whole = images[0].manifest if len(images) == 1 else index_of(*images)
    (path / "manifest.json").write_bytes(whole)
    return path


def sif_of(squashfs: bytes, architecture: bytes = b"", *, kind: int = 0x4004, system: int = 1,
           size: int | None = None, config: bytes = b"") -> bytes:
    """A `.sif` file with a root file system, and with the configuration of an image if one is
    given."""
    codes = {"linux/amd64": b"02", "linux/arm64": b"04"}
    architecture = architecture or codes[HERE]
    start = 32768
    length = len(squashfs) if size is None else size
    head = struct.pack("<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0",
                       b"01\0", architecture + b"\0", bytes(16), 0, 0, 47, 48, 4096, 48 * 585,
                       start, length)
    first = struct.pack("<i?III7q128s384s", 0x4001, True, 1, 0, 0, start, 0, 0, 0, 0, 0, 0,
                        b"def", b"")
    second = struct.pack("<i?III7q128s384s", kind, True, 2, 0, 0, start, length, length, 0, 0, 0, 0,
                         b"rootfs", struct.pack("<ii3s", system, 2, architecture + b"\0"))
    third = struct.pack("<i?III7q128s384s", 0x4006, True, 3, 0, 0, start + len(squashfs),
                        len(config), len(config), 0, 0, 0, 0, b"oci-config.json", b"")
    table = (first + (third if config else b"") + second).ljust(start - 4096, b"\0")
    return head.ljust(4096, b"\0") + table + squashfs + config


def squashfs_of(entries: Sequence[Entry], folder: Path, *options: str) -> bytes:
    """A squashfs of these entries, made by mksquashfs."""
    tree, out = folder / "tree", folder / "image.squashfs"
    tree.mkdir()
    with tarfile.open(fileobj=io.BytesIO(tar_of(*entries))) as tar:
        if hasattr(tarfile, "fully_trusted_filter"):  # Debian 12's 3.11.2 knows no filters
            tar.extraction_filter = tarfile.fully_trusted_filter
        tar.extractall(tree)
    subprocess.run(["mksquashfs", tree, out, "-quiet", "-no-progress", "-all-root", *options],
                   check=True, capture_output=True)
    return out.read_bytes()


# ---- registries ----


@dataclass(frozen=True)
class RunningRegistry:
    """A registry that runs: where, and how one proves who one is.

    Attributes:
        access_log: the file in which it notes each request.
    """

    host: str
    scheme: str = "http"
    user: str = ""
    password: str = ""
    authority: str = ""
    access_log: Path = Path()

    def fetched(self, digest: str) -> int:
        """How often a blob was fetched from it."""
        return len(re.findall(rf'"GET \S+/blobs/{digest} ', self.access_log.read_text()))

    def push(self, name: str, image: MadeImage, tag: str = "latest") -> str:
        """Pushes an image; returns the digest of its manifest."""
        for data in image.blobs.values():
            self.put_blob(name, data)
        self.put_manifest(name, tag, image.manifest, image.kind)
        return image.digest

    def put_blob(self, name: str, data: bytes) -> None:
        answer = self._call("POST", f"{self.scheme}://{self.host}/v2/{name}/blobs/uploads/", b"")
        where = answer.headers["Location"]
        self._call("PUT", f"{where}{'&' if '?' in where else '?'}digest={digest(data)}", data)

    def put_manifest(self, name: str, tag: str, data: bytes, kind: str) -> None:
        self._call("PUT", f"{self.scheme}://{self.host}/v2/{name}/manifests/{tag}", data, kind)

    def _call(self, method: str, url: str, data: bytes, kind: str = "application/octet-stream"
              ) -> Any:
        request = urllib.request.Request(url, data, {"Content-Type": kind}, method=method)
        if self.user:
            import base64

            both = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            request.add_header("Authorization", f"Basic {both}")
        context = None
        if self.authority:
            import ssl

            context = ssl.create_default_context(cafile=self.authority)
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return answer


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def registry(folder: Path, *, htpasswd: str = "", tls: tuple[str, str, str] | None = None,
             user: str = "", password: str = "", address: str = "127.0.0.1"
             ) -> Iterator[RunningRegistry]:
    """Runs Debian's docker-registry on a port of its own.

    Args:
        folder: where it keeps its files.
        htpasswd: a file of passwords; empty for none.
        tls: its certificate, its key and the authority's certificate; None for plain HTTP.
        user, password: with which `push` proves who it is.
        address: where it listens.
    """
    port = free_port()
    config: dict[str, Any] = {
        "version": "0.1", "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")},
                    "maintenance": {"uploadpurging": {"enabled": False}}},
        "http": {"addr": f"{address}:{port}", "secret": "x"}}
    if htpasswd:
        config["auth"] = {"htpasswd": {"realm": "test", "path": htpasswd}}
    if tls:
        config["http"]["tls"] = {"certificate": tls[0], "key": tls[1]}
    file = folder / "registry.json"  # YAML is a superset of JSON
    file.write_text(json.dumps(config))
    log = folder / "access.log"
    with log.open("wb") as out:
        process = subprocess.Popen(["docker-registry", "serve", str(file)],
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
                break
            time.sleep(0.02)
        yield RunningRegistry(f"{address}:{port}", "https" if tls else "http", user, password,
                              tls[2] if tls else "", log)
    finally:
        process.kill()
        process.wait()


def reason_without_fuse() -> str:
    """Why fuse-overlayfs cannot be used here; an empty text if it can."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
        subprocess.run(["fuse-overlayfs", "--version"], capture_output=True, check=True)
    except OSError as error:
        return f"fuse-overlayfs: {error}"
    return ""
