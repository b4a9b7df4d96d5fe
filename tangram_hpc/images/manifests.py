"""Reads manifests, indexes and configurations of images: the formats of OCI and of Docker's
registries (schema 2). Pure.

All of these are JSON from a stranger. So every field that is used is checked, with bounds, and
everything else is ignored. Whether the bytes have the digest that was asked for is checked before
they come here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .image_errors import ImageRefused
from .image_limits import LAYERS_MAX, MANIFEST_MAX

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
ACCEPTED = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x",
             "riscv64": "riscv64", "i686": "386", "armv7l": "arm"}
_ENV_MAX, _TEXT_MAX = 1024, 32768
_SIZE_MAX = 1 << 40


@dataclass(frozen=True)
class BlobRef:
    """A reference to a blob.

    Attributes:
        digest: its digest, `sha256:HEX`.
        size: its size in bytes.
    """

    digest: str
    size: int


@dataclass(frozen=True)
class ImageManifest:
    """What one image for one platform is made of.

    Attributes:
        config: its configuration.
        layers: its layers, the lowest first.
    """

    config: BlobRef
    layers: tuple[BlobRef, ...]


@dataclass(frozen=True)
class ImageIndex:
    """A list of images or of further indexes.

    Attributes:
        entries: pairs of a reference and the platform, as `os/architecture`; empty for unknown.
        names: for each entry its name in an OCI layout; empty for none.
    """

    entries: tuple[tuple[BlobRef, str], ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageConfig:
    """The part of a configuration that is used.

    Attributes:
        diff_ids: the digests of the layers' uncompressed tars, the lowest first.
        platform: `os/architecture`.
        env: variables that the image's programs expect, as NAME=VALUE.
        working_dir: the directory in which its programs start; empty for none.
        user: the user that it names; empty for none.
    """

    diff_ids: tuple[str, ...]
    platform: str = ""
    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""


def digest_of(data: bytes) -> str:
    """Returns the digest of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_digest(text: object) -> bool:
    """Whether this is a digest of the one kind that is taken here, sha256."""
    return isinstance(text, str) and bool(_DIGEST.fullmatch(text))


def platform_of(machine: str) -> str:
    """Returns the platform of a machine, which is called as by `uname -m`."""
    return f"linux/{_MACHINES.get(machine, machine)}"


def parse_manifest(data: bytes) -> ImageManifest | ImageIndex:
    """Reads a manifest or an index.

    Raises:
        ImageRefused: it is too large, is no manifest, or a field is wrong.
    """
    record = read_json(data, "manifest")
    if record.get("schemaVersion") == 1:
        raise ImageRefused("image: its manifest has schema 1, which registries gave up; push the "
                           "image again with a current tool")
    if "manifests" in record:
        entries = tuple(_index_entry(one) for one in _list(record, "manifests", "index"))
        names = tuple(_ref_name(one) for one in record["manifests"])
        return ImageIndex(entries, names)
    if "config" not in record:
        raise ImageRefused("image: its manifest has no field `config`")
    layers = tuple(_blob(one, "layers") for one in _list(record, "layers", "manifest"))
    return ImageManifest(_blob(record["config"], "config"), layers)


def parse_config(data: bytes) -> ImageConfig:
    """Reads a configuration; raises as `parse_manifest`."""
    record = read_json(data, "configuration")
    rootfs = record.get("rootfs")
    diff_ids = _list(rootfs, "diff_ids", "configuration") if isinstance(rootfs, dict) else None
    if diff_ids is None or not all(is_digest(one) for one in diff_ids):
        raise ImageRefused("image: its configuration does not name its layers (rootfs.diff_ids)")
    inner = record.get("config")
    programs = parse_programs(inner if isinstance(inner, dict) else {})
    return replace(programs, diff_ids=tuple(diff_ids), platform=_platform(record))


def parse_programs(record: Mapping[str, Any]) -> ImageConfig:
    """Reads what a configuration says of the image's programs; the layers are left empty."""
    env = record.get("Env")
    kept = tuple(one for one in env[:_ENV_MAX] if isinstance(one, str) and len(one) <= _TEXT_MAX
                 and "=" in one and "\0" not in one and _is_unicode(one)
                 ) if isinstance(env, list) else ()
    return ImageConfig((), "", kept, _text(record.get("WorkingDir")), _text(record.get("User")))


def _is_unicode(text: str) -> bool:
    """Whether a text of JSON can be sent as UTF-8: half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def choose_platform(index: ImageIndex, platform: str) -> BlobRef:
    """Returns the image of an index for a platform.

    Raises:
        ImageRefused: there is none; the message lists the platforms that there are.
    """
    for blob, offered in index.entries:
        if offered == platform:
            return blob
    unknown = [blob for blob, offered in index.entries if not offered]
    if len(index.entries) == 1 and unknown:
        return unknown[0]
    offers = sorted({offered for _, offered in index.entries if offered})
    raise ImageRefused(f"image: there is none for {platform}; there is "
                       f"{', '.join(offers[:12]) or 'none at all'}")


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """Reads a JSON object; `what` names it in an error.

    Raises:
        ImageRefused: it is too large, or no JSON object.
    """
    if len(data) > MANIFEST_MAX:
        raise ImageRefused(f"image: its {what} has more than {MANIFEST_MAX} bytes")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ImageRefused(f"image: its {what} is not a JSON object")
    return record


def _list(record: Mapping[str, Any], field: str, what: str) -> Sequence[Any]:
    value = record.get(field)
    if not isinstance(value, list):
        raise ImageRefused(f"image: its {what} has no list `{field}`")
    if len(value) > LAYERS_MAX:
        raise ImageRefused(f"image: its {what} has {len(value)} entries in `{field}`; at most "
                           f"{LAYERS_MAX} are allowed")
    return value


def _blob(value: Any, field: str) -> BlobRef:
    if not isinstance(value, dict) or not is_digest(value.get("digest")):
        raise ImageRefused(f"image: its manifest names a blob in `{field}` without a sha256 digest")
    size = value.get("size")
    if type(size) is not int or not 0 <= size <= _SIZE_MAX:
        raise ImageRefused(f"image: its manifest gives a blob in `{field}` the size "
                           f"{str(size)[:40]}")
    return BlobRef(value["digest"], size)


def _index_entry(value: Any) -> tuple[BlobRef, str]:
    blob = _blob(value, "manifests")
    platform = value.get("platform")
    return blob, _platform(platform) if isinstance(platform, dict) else ""


def _platform(record: Mapping[str, Any]) -> str:
    system, architecture = _text(record.get("os")), _text(record.get("architecture"))
    return f"{system}/{architecture}" if system and architecture else ""


def _ref_name(value: Mapping[str, Any]) -> str:
    notes = value.get("annotations")
    if not isinstance(notes, dict):
        return ""
    return _text(notes.get("org.opencontainers.image.ref.name"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= _TEXT_MAX and value.isprintable() \
        else ""
