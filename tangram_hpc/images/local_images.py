"""Finds images in files and folders: OCI layouts, tars of these, what `docker save` writes, and the
folders of `skopeo copy` to `dir:`.

An archive is never unpacked as a whole. Its table of contents is read once, and a blob is read from
where it lies in the archive. An archive that is compressed as a whole is refused, as nothing in it
could be found without unpacking it.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import IO, Protocol

from ..domain.image_name import (
    DOCKER_ARCHIVE,
    OCI,
    OCI_ARCHIVE,
    ImageName,
    parse_image_name,
)
from ..errors import InvalidInput
from .found_image import FoundImage, check_platform, find_image
from .image_errors import ImageRefused, of_os_error
from .image_limits import LAYERS_MAX, MANIFEST_MAX
from .manifests import (
    BlobRef,
    ImageIndex,
    digest_of,
    is_digest,
    parse_config,
    parse_manifest,
    read_json,
)

_MEMBERS_MAX = 20_000  # entries of an archive, which has a few for each layer
_PIECE = 1 << 20
DIR = "dir"  # the kind of a folder as `skopeo copy` writes it to `dir:`
_DIR_VERSION = b"Directory Transport Version: "
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz",
               b"BZh": "bunzip2"}


class _Files(Protocol):
    """The files of a layout, by their names in it."""

    def open(self, name: str) -> IO[bytes]:
        """Opens a file.

        Raises:
            ImageRefused: it does not exist.
        """
        ...


def find_local_image(name: ImageName, platform: str) -> FoundImage:
    """Finds an image in a file or folder.

    Args:
        name: its name, of the kind OCI, DIR, OCI_ARCHIVE or DOCKER_ARCHIVE.
        platform: the platform of this machine.

    Raises:
        ImageRefused: there is none, or it breaks a rule.
        ImageUnavailable: it cannot be read now.
    """
    files = _FolderFiles(name.path) if name.kind in (OCI, DIR) else _TarFiles(name.path)
    if name.kind == DIR:
        return find_image(_DirSource(files), "", platform)
    if name.kind == DOCKER_ARCHIVE:
        return _docker_archive(files, name, platform)
    return _oci(files, name, platform)


def folder_kind(path: str) -> str:
    """Returns which kind of image a folder is: OCI, DIR, or empty for a root file system."""
    if os.path.isfile(f"{path}/oci-layout") and os.path.isfile(f"{path}/index.json"):
        return OCI
    if os.path.isfile(f"{path}/version") and os.path.isfile(f"{path}/manifest.json"):
        with suppress(OSError), open(f"{path}/version", "rb") as file:
            return DIR if file.read(len(_DIR_VERSION)) == _DIR_VERSION else ""
    return ""


def archive_kind(path: str) -> str:
    """Returns which kind of archive a tar is: OCI_ARCHIVE, or DOCKER_ARCHIVE.

    Raises:
        ImageRefused: it is neither.
    """
    files = _TarFiles(path)
    if files.has("oci-layout") and files.has("index.json"):
        return OCI_ARCHIVE
    if files.has("manifest.json"):
        return DOCKER_ARCHIVE
    raise ImageRefused(f"image: {path} is a tar, but neither of an OCI layout nor written by "
                       "`docker save`; a tar of a root file system must be unpacked into a folder")


def open_regular(path: str) -> IO[bytes]:
    """Opens a regular file; anything else is refused at once and not waited for.

    Raises:
        ImageRefused, ImageUnavailable: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImageRefused(f"image: {path} is not a regular file")
        return open(fd, "rb")
    except OSError as error:
        raise of_os_error(path, error) from None


class _FolderFiles:
    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        return open_regular(os.path.join(self._path, name))


class _Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._left = file, size
        file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        piece = self._file.read(min(len(view), self._left))
        view[: len(piece)] = piece
        self._left -= len(piece)
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()


class _TarFiles:
    """The files of an archive: where each of them lies in it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with open_regular(path) as file:
            head = file.read(8)
            for magic, program in _COMPRESSED.items():
                if head.startswith(magic):
                    raise ImageRefused(f"image: the archive {path} is compressed as a whole; "
                                       f"unpack it with {program} first")
            file.seek(0)
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    self._read(tar)
            except (tarfile.TarError, ValueError, OverflowError, RecursionError, LookupError,
                    EOFError, AttributeError, TypeError, MemoryError):
                raise ImageRefused(f"image: {path} is not a valid tar") from None

    def _read(self, tar: tarfile.TarFile) -> None:
        count = -1
        for count, member in enumerate(tar):
            if count > _MEMBERS_MAX:
                raise ImageRefused(f"image: the archive {self._path} has more than {_MEMBERS_MAX} "
                                   "entries")
            name = str(PurePosixPath(member.name))
            if member.isreg() and member.sparse is None and member.size >= 0:
                self._places[name] = member.offset_data, member.size
            elif member.issym():  # `docker save` links layers that are equal
                parts: list[str] = []
                for part in PurePosixPath(name).parent.joinpath(member.linkname).parts:
                    parts = parts[:-1] if part == ".." else [*parts, part]
                self._links[name] = "/".join(parts)
        if count < 0:  # a disk image begins with zeros, which end a tar
            raise EOFError

    def has(self, name: str) -> bool:
        return name in self._places

    def open(self, name: str) -> IO[bytes]:
        place = self._places.get(name) or self._places.get(self._links.get(name, ""))
        if place is None:
            raise ImageRefused(f"image: the archive {self._path} has no file {name!r}")
        return io.BufferedReader(_Part(open_regular(self._path), *place), _PIECE)


def _small(files: _Files, name: str) -> bytes:
    with files.open(name) as file:
        data = file.read(MANIFEST_MAX + 1)
    if len(data) > MANIFEST_MAX:
        raise ImageRefused(f"image: its file {name!r} has more than {MANIFEST_MAX} bytes")
    return data


def _blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


class _LayoutSource:
    def __init__(self, files: _Files) -> None:
        self._files = files

    def manifest(self, reference: str) -> tuple[bytes, str]:
        data = _small(self._files, _blob_name(reference))
        if digest_of(data) != reference:
            raise ImageRefused(f"image: the file of the manifest {reference} has another digest")
        return data, reference

    def open_blob(self, blob: BlobRef) -> IO[bytes]:
        """Opens a blob. A layer is compared with the digest of its uncompressed tar when it is
        unpacked, so it is not read twice.
        """
        return self._files.open(_blob_name(blob.digest))


class _DirSource:
    """A folder of `dir:`: each blob is named by the digits of its digest, and the image of a
    platform, if there are several, by those and `.manifest.json`."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Returns the manifest of the folder itself if there is no `reference`."""
        name = f"{reference.removeprefix('sha256:')}.manifest.json" if reference else \
            "manifest.json"
        data = _small(self._files, name)
        if reference and digest_of(data) != reference:
            raise ImageRefused(f"image: the file of the manifest {reference} has another digest")
        return data, digest_of(data)

    def open_blob(self, blob: BlobRef) -> IO[bytes]:
        """Opens a blob, as a layout does."""
        return self._files.open(blob.digest.removeprefix("sha256:"))


def _oci(files: _Files, name: ImageName, platform: str) -> FoundImage:
    index = parse_manifest(_small(files, "index.json"))
    if not isinstance(index, ImageIndex):
        raise ImageRefused(f"image: {name.path} has no index of an OCI layout")
    return find_image(_LayoutSource(files), _choose(index, name, platform), platform)


def _choose(index: ImageIndex, name: ImageName, platform: str) -> str:
    """Returns the digest of the image of a layout that a name means."""
    blobs = [(blob, offered) for (blob, offered), title in
             zip(index.entries, index.names, strict=True) if not name.tag or title == name.tag]
    if not blobs:
        known = sorted({title for title in index.names if title})
        raise ImageRefused(f"image: {name.path} has no image {name.tag!r}; it has "
                           f"{', '.join(known[:12]) or 'none with a name'}")
    digests = {blob.digest for blob, _ in blobs}
    if len(digests) > 1:
        digests = {blob.digest for blob, offered in blobs if offered == platform} or digests
    if len(digests) > 1:
        known = sorted({title for title in index.names if title})
        raise ImageRefused(f"image: {name.path} has several images; name one of "
                           f"{', '.join(known[:12]) or 'them'} as {name.kind}:{name.path}:NAME")
    return digests.pop()


def _docker_archive(files: _Files, name: ImageName, platform: str) -> FoundImage:
    records = read_json(b'{"images": ' + _small(files, "manifest.json") + b"}", "manifest.json")
    images = records["images"] if isinstance(records.get("images"), list) else []
    wanted = [one for one in images if isinstance(one, dict)
              and (not name.tag or _full(name.tag) in map(_full, _tags(one)))]
    if len(wanted) != 1:
        known = [tag for one in images if isinstance(one, dict) for tag in _tags(one)]
        what = "several images; name one of" if wanted else f"no image {name.tag!r}; it has"
        raise ImageRefused(f"image: {name.path} has {what} {', '.join(known[:12]) or 'none'}")
    config, layers = wanted[0].get("Config"), wanted[0].get("Layers")
    if not isinstance(config, str) or not isinstance(layers, list) or len(layers) > LAYERS_MAX \
            or not all(isinstance(one, str) for one in layers):
        raise ImageRefused(f"image: the manifest.json of {name.path} does not name its files")
    data = _small(files, config)
    parsed = parse_config(data)
    check_platform(parsed, platform)
    if len(parsed.diff_ids) != len(layers):
        raise ImageRefused(f"image: its configuration names {len(parsed.diff_ids)} layers and "
                           f"manifest.json {len(layers)}")
    return FoundImage(digest_of(data), parsed, tuple(_opener(files, one) for one in layers))


def _tags(record: dict[str, object]) -> list[str]:
    tags = record.get("RepoTags")
    return [tag for tag in tags if isinstance(tag, str) and tag.isprintable()
            ] if isinstance(tags, list) else []


def _full(tag: str) -> str:
    """Returns the name of an image with everything that was left out, if it is one."""
    try:
        return parse_image_name(tag).full
    except InvalidInput:
        return tag


def _opener(files: _Files, name: str) -> Callable[[], IO[bytes]]:
    return lambda: files.open(name)


def file_digest(path: str) -> str:
    """Returns the digest of a file; raises as `open_regular`."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    text = f"sha256:{digest.hexdigest()}"
    assert is_digest(text)
    return text
