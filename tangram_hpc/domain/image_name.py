"""Reads the name of an image as people write it. Pure.

A session's `image` may be a path of the node or a name in a registry:

| written as | is |
|---|---|
| `/path` | a root file system, an OCI layout or skopeo's `dir:`; a `.sif`, squashfs or archive |
| `oci:/path[:tag]` | an OCI layout, a folder |
| `oci-archive:/path[:tag]` | a tar of an OCI layout |
| `docker-archive:/path[:name]` | what `docker save` wrote |
| `docker://name`, `name` | an image of a registry: `[registry/]path[:tag][@sha256:...]` |

A name without a registry belongs to the default registry, as with every other tool. No file and no
network is touched here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidInput

DEFAULT_REGISTRY = "docker.io"
PATH, OCI, OCI_ARCHIVE, DOCKER_ARCHIVE, REGISTRY = (
    "path", "oci", "oci-archive", "docker-archive", "registry")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])"
                   r"(?::[0-9]{1,5})?")
_REMEDY = ("write /path, oci:/path, oci-archive:/path, docker-archive:/path, or "
           "[registry/]name[:tag][@sha256:DIGEST]")


@dataclass(frozen=True)
class ImageName:
    """The parts of an image's name.

    Attributes:
        text: the name as it was written.
        kind: one of PATH, OCI, OCI_ARCHIVE, DOCKER_ARCHIVE and REGISTRY.
        path: the absolute path, for all kinds but REGISTRY.
        tag: the tag, or the name inside an archive; empty for none.
        registry: host and port of the registry.
        repository: the path of the image in its registry.
        digest: the digest that the manifest must have; empty for none.
    """

    text: str
    kind: str
    path: str = ""
    tag: str = ""
    registry: str = ""
    repository: str = ""
    digest: str = ""

    @property
    def full(self) -> str:
        """The name with everything that was left out; two names of one image have the same."""
        if self.kind == PATH:
            return self.path
        if self.kind != REGISTRY:
            return f"{self.kind}:{self.path}" + (f":{self.tag}" if self.tag else "")
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.registry}/{self.repository}{end}"


def parse_image_name(text: str) -> ImageName:
    """Reads the name of an image.

    Raises:
        InvalidInput: it is not a name of an image; the message says how one is written.
    """
    if not text or "\0" in text or text != text.strip() or not text.isprintable():
        raise InvalidInput(f"image: {text!r} is no name of an image; {_REMEDY}")
    if text.startswith("/"):
        return ImageName(text, PATH, path=text)
    if text.startswith(("./", "../", "~")):
        raise InvalidInput(f"image: {text!r} is a relative path, and a node has another current "
                           "folder than you; write the absolute path")
    scheme, colon, rest = text.partition(":")
    if colon and scheme in (OCI, OCI_ARCHIVE, DOCKER_ARCHIVE) and not _TAG.fullmatch(rest):
        return _local(text, scheme, rest)
    if text.startswith("docker://"):
        return _remote(text, text.removeprefix("docker://"))
    if "://" in text:
        raise InvalidInput(f"image: {text!r} has the unknown scheme {text.partition('://')[0]}://; "
                           f"{_REMEDY}")
    if text.endswith(".sif") and "/" not in text:
        raise InvalidInput(f"image: {text!r} is a relative path, and a node has another current "
                           "folder than you; write the absolute path")
    return _remote(text, text)


def _local(text: str, kind: str, rest: str) -> ImageName:
    folder, slash, last = rest.rpartition("/")
    name, _, tag = last.partition(":")
    if kind == DOCKER_ARCHIVE and ".tar" in rest:
        # the name inside may hold slashes: what follows the first colon after the file's name
        at = rest.find(":", rest.index(".tar"))
        path, tag = (rest, "") if at < 0 else (rest[:at], rest[at + 1:])
    else:
        path = f"{folder}{slash}{name}"
    if not path.startswith("/"):
        raise InvalidInput(f"image: {text!r} has no absolute path; write {kind}:/path")
    return ImageName(text, kind, path=path, tag=tag)


def _remote(text: str, name: str) -> ImageName:
    rest, at, digest = name.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise InvalidInput(f"image: {text!r} has no digest of the form sha256: and 64 hexadecimal "
                           "digits after its @")
    first, slash, path = rest.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        registry, rest = first, path
    else:
        registry = DEFAULT_REGISTRY
    repository, _, tag = rest.partition(":")
    if not _HOST.fullmatch(registry) or not _REPOSITORY.fullmatch(repository) or (
            tag and not _TAG.fullmatch(tag)) or rest.endswith(":"):
        raise InvalidInput(f"image: {text!r} is no name of an image; {_REMEDY}")
    if registry == DEFAULT_REGISTRY and "/" not in repository:
        repository = f"library/{repository}"
    return ImageName(text, REGISTRY, tag=tag or ("" if digest else "latest"), registry=registry,
                     repository=repository, digest=digest)
