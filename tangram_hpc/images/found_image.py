"""What every source of images answers: which image a name stands for, and how its layers are read.

`find_image` follows an index to the image for this machine's platform and reads its configuration.
It works the same for a registry and for an OCI layout, which differ only in where bytes come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Protocol

from .image_errors import ImageRefused
from .image_limits import INDEX_DEPTH_MAX, MANIFEST_MAX
from .manifests import (
    BlobRef,
    ImageConfig,
    ImageManifest,
    choose_platform,
    digest_of,
    parse_config,
    parse_manifest,
)


@dataclass(frozen=True)
class FoundImage:
    """An image that can be unpacked.

    Attributes:
        digest: what identifies it: the digest of its manifest, or of its configuration in an
            archive that has no manifest.
        config: the part of its configuration that is used.
        layers: for each entry of `config.diff_ids` a function that opens the layer.
    """

    digest: str
    config: ImageConfig
    layers: tuple[Callable[[], IO[bytes]], ...]


class ImageSource(Protocol):
    """Where manifests and blobs come from."""

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Returns the manifest or index of a tag or digest, and its digest, which was checked.

        Raises:
            ImageRefused: there is none.
            ImageUnavailable: it cannot be had now.
        """
        ...

    def open_blob(self, blob: BlobRef) -> IO[bytes]:
        """Opens a blob of the right digest, or raises as `manifest`."""
        ...


def find_image(source: ImageSource, reference: str, platform: str) -> FoundImage:
    """Returns the image of a tag or digest for a platform; raises as the source does."""
    for _ in range(INDEX_DEPTH_MAX):
        data, digest = source.manifest(reference)
        record = parse_manifest(data)
        if isinstance(record, ImageManifest):
            return _with_config(source, record, digest, platform)
        reference = choose_platform(record, platform).digest
    raise ImageRefused(f"image: its index leads through more than {INDEX_DEPTH_MAX} indexes")


def _with_config(source: ImageSource, manifest: ImageManifest, digest: str, platform: str
                 ) -> FoundImage:
    if manifest.config.size > MANIFEST_MAX:
        raise ImageRefused(f"image: its configuration has more than {MANIFEST_MAX} bytes")
    with source.open_blob(manifest.config) as file:
        data = file.read(MANIFEST_MAX + 1)
    if digest_of(data) != manifest.config.digest:
        raise ImageRefused("image: its configuration does not have the digest that its manifest "
                           "says")
    config = parse_config(data)
    check_platform(config, platform)
    if len(config.diff_ids) != len(manifest.layers):
        raise ImageRefused(f"image: its configuration names {len(config.diff_ids)} layers and its "
                           f"manifest {len(manifest.layers)}")
    layers = tuple(_opener(source, blob) for blob in manifest.layers)
    return FoundImage(digest, config, layers)


def check_platform(config: ImageConfig, platform: str) -> None:
    """Raises ImageRefused if an image says that it is for another platform."""
    if config.platform and config.platform != platform:
        raise ImageRefused(f"image: it is for {config.platform}, and this node is {platform}")


def _opener(source: ImageSource, blob: BlobRef) -> Callable[[], IO[bytes]]:
    return lambda: source.open_blob(blob)
