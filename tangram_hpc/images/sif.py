"""Unpacks the root file system of a `.sif` file, Apptainer's and Singularity's format, and of a
bare squashfs, such as the `.sqsh` files that `enroot import` writes.

A `.sif` file has a header, a table of descriptors, and objects. Of these two are used: the primary
system partition, which holds a squashfs, and the configuration of the image from which the file was
built, if it was built from one of a registry or an archive. `unsquashfs` of squashfs-tools unpacks
the squashfs; the file is only read. What it wrote is then made like the files of a layer: the
user's own, without set-user-ID bits, and with nothing in it but files, links and directories.

The header is read here, as its layout is short and fixed:
https://github.com/sylabs/sif, docs and pkg/sif (version 1).
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO, NamedTuple

from .confined_tree import FOLDER, shown
from .image_errors import MAKE_ROOM, ImageRefused, ImageUnavailable, of_os_error
from .image_limits import DEPTH_MAX, MANIFEST_MAX, UnpackBudget
from .local_images import open_regular
from .manifests import ImageConfig, parse_programs, read_json

SIF, SQUASHFS = "sif", "squashfs"  # kinds of files at a path
MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?III7q128s384s")
_PARTITION, _SQUASHFS, _PRIMARY = 0x4004, 1, 2
_JSON, _CONFIG_NAME = 0x4006, b"oci-config.json"
_DESCRIPTORS_MAX = 1024
_ARCHITECTURES = {b"01": "386", b"02": "amd64", b"03": "arm", b"04": "arm64", b"06": "ppc64le",
                  b"11": "s390x"}
_SQUASH_MAGIC = b"hsqs"
_NO_TOOL = ("image: unsquashfs is not installed on this node, and neither a .sif file nor a "
            "squashfs can be unpacked without it; install squashfs-tools, or convert the image "
            "with `apptainer build --sandbox FOLDER IMAGE.sif` and name the folder")


class _Object(NamedTuple):
    """An entry of the table of a `.sif` file: its kind, where it lies, and its own fields."""

    kind: int
    start: int
    size: int
    name: bytes
    extra: bytes


@dataclass(frozen=True)
class SifPartition:
    """The primary system partition of a `.sif` file: where it lies, and its platform."""

    offset: int
    size: int
    platform: str


def squashed_kind(path: str) -> str:
    """Returns SIF or SQUASHFS, by what a file begins with; empty for another kind of file."""
    with open_regular(path) as file:
        head = file.read(42)
    if head.startswith(_SQUASH_MAGIC):
        return SQUASHFS
    return SIF if head[32:] == MAGIC else ""


def _objects(file: IO[bytes], path: str) -> Iterator[_Object]:
    """Reads the table of a `.sif` file; raises ImageRefused if its header is damaged."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[32:42] != MAGIC:
        raise ImageRefused(f"image: {path} is not a .sif file")
    fields = _HEADER.unpack(head)
    total, offset = fields[8], fields[9]
    if not 0 < total <= _DESCRIPTORS_MAX or not 0 < offset <= size:
        raise ImageRefused(f"image: the .sif file {path} has a damaged header")
    file.seek(offset)
    table = file.read(total * _DESCRIPTOR.size)
    for at in range(0, len(table) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        kind, used, _, _, _, start, length, *_, name, extra = _DESCRIPTOR.unpack_from(table, at)
        if used and kind in (_PARTITION, _JSON):
            yield _Object(kind, start, length, name.rstrip(b"\0"), extra)


def sif_partition(file: IO[bytes], path: str) -> SifPartition:
    """Finds the root file system in a `.sif` file.

    Raises:
        ImageRefused: the file is damaged, or its root file system is encrypted or no squashfs.
    """
    size = os.fstat(file.fileno()).st_size
    for one in _objects(file, path):
        file_system, part, architecture = struct.unpack_from("<ii2s", one.extra)
        if one.kind != _PARTITION or part != _PRIMARY:
            continue
        if file_system != _SQUASHFS:
            raise ImageRefused(f"image: the root file system of {path} is encrypted or no squashfs")
        if one.start < 0 or one.size <= 0 or one.start + one.size > size:
            raise ImageRefused(f"image: the .sif file {path} is cut off or damaged")
        return SifPartition(one.start, one.size,
                            f"linux/{_ARCHITECTURES.get(architecture, 'unknown')}")
    raise ImageRefused(f"image: the .sif file {path} has no root file system")


def sif_config(path: str) -> ImageConfig:
    """Returns what a `.sif` file says of its programs: ENV and WORKDIR of the image from which it
    was built. Its USER is left out, since the files of a `.sif` file have lost their owners.

    Raises:
        ImageRefused: the file is damaged.
    """
    with open_regular(path) as file:
        if file.read(len(_SQUASH_MAGIC)) == _SQUASH_MAGIC:
            return ImageConfig(())
        file.seek(0)
        for one in _objects(file, path):
            if one.kind == _JSON and one.name == _CONFIG_NAME and one.start > 0:
                file.seek(one.start)
                record = read_json(file.read(min(max(one.size, 0), MANIFEST_MAX + 1)),
                                   "configuration")
                return replace(parse_programs(record), user="")
    return ImageConfig(())


def unpack_squashed(path: str, folder: str, platform: str, budget: UnpackBudget) -> int:
    """Unpacks a `.sif` file or a squashfs into a folder that does not exist; returns the bytes of
    its files. A squashfs does not say for which platform it is.

    Raises:
        ImageRefused: it is damaged, too large, for another platform, or there is no unsquashfs.
        ImageUnavailable: the disk is full or fails.
    """
    with open_regular(path) as file:
        if file.read(len(_SQUASH_MAGIC)) == _SQUASH_MAGIC:
            return unpack_squashfs(path, 0, folder, budget)
        file.seek(0)
        part = sif_partition(file, path)
        file.seek(part.offset)
        if file.read(len(_SQUASH_MAGIC)) != _SQUASH_MAGIC:
            raise ImageRefused(f"image: the root file system of {path} is no squashfs")
    if part.platform != platform:
        raise ImageRefused(f"image: {path} is for {part.platform}, and this node is {platform}")
    return unpack_squashfs(path, part.offset, folder, budget)


def unpack_squashfs(path: str, offset: int, folder: str, budget: UnpackBudget) -> int:
    """Unpacks a squashfs that begins at an offset of a file; see `unpack_squashed`."""
    program = shutil.which("unsquashfs")
    if program is None:
        raise ImageRefused(_NO_TOOL)
    common = [program, "-o", str(offset), "-no-progress"]
    _count([*common, "-lln", path], path, budget)
    done = subprocess.run([*common, "-no-xattrs", "-ignore-errors", "-dest", folder, path],
                          stdin=subprocess.DEVNULL, capture_output=True, check=False,
                          env=_environment())
    if not os.path.isdir(folder):
        raise ImageRefused(f"image: unsquashfs cannot unpack {path} ({_last(done.stderr)})")
    if b"No space left" in done.stderr or b"Disk quota" in done.stderr:
        raise ImageUnavailable(f"image: {path} cannot be unpacked: the disk is full; {MAKE_ROOM}")
    if done.returncode not in (0, 2):  # 2: something was left out, such as a device node
        raise ImageRefused(f"image: unsquashfs cannot unpack {path} ({_last(done.stderr)})")
    os.chmod(folder, 0o755)
    try:
        top = os.open(folder, FOLDER)
        try:
            return _clean(top, 0)
        finally:
            os.close(top)
    except OSError as error:
        raise of_os_error(path, error) from None


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def _last(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return shown(lines[-1])[1:-1] if lines else "without a reason"


def _count(command: list[str], path: str, budget: UnpackBudget) -> None:
    """Counts what a squashfs would unpack to, before anything is written."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=_environment()) as listing:
        assert listing.stdout is not None and listing.stderr is not None
        try:
            for line in listing.stdout:
                words = line.split(None, 5)
                if len(words) < 5 or line[:1] not in b"-dlbcps":
                    continue
                budget.take_entry()
                if line[:1] == b"-" and words[2].isdigit():
                    budget.take_bytes(int(words[2]))
        except ImageRefused:
            listing.kill()
            raise
        why = _last(listing.stderr.read(4096))
    if listing.returncode:
        raise ImageRefused(f"image: unsquashfs cannot read {path} ({why})")


def _clean(folder: int, depth: int) -> int:
    """Removes what an image cannot have here, and opens directories and files to their owner.
    Returns the bytes of the files.
    """
    if depth > DEPTH_MAX:
        raise ImageRefused(f"image: it has paths of more than {DEPTH_MAX} directories")
    size = 0
    for name in os.listdir(folder):
        about = os.lstat(name, dir_fd=folder)
        mode = stat.S_IMODE(about.st_mode)
        if stat.S_ISDIR(about.st_mode):
            os.chmod(name, mode & 0o1777 | 0o700, dir_fd=folder)
            below = os.open(name, FOLDER, dir_fd=folder)
            try:
                size += _clean(below, depth + 1)
            finally:
                os.close(below)
        elif stat.S_ISREG(about.st_mode):
            size += about.st_size
            os.chmod(name, mode & 0o777 | 0o600, dir_fd=folder)
            if about.st_uid != os.geteuid() or about.st_gid != os.getegid():
                os.chown(name, os.geteuid(), os.getegid(), dir_fd=folder)
        elif not stat.S_ISLNK(about.st_mode):
            os.unlink(name, dir_fd=folder)
        if not stat.S_ISREG(about.st_mode) and os.geteuid() == 0 and stat.S_IFMT(
                about.st_mode) in (stat.S_IFDIR, stat.S_IFLNK):
            os.chown(name, 0, os.getegid(), dir_fd=folder, follow_symlinks=False)
    return size
