"""Bounds on what an image may hold, so that a hostile image costs no more than a large one. Pure.

All of them are far above what real images need: the largest public images have about 120 layers, a
million files and 60 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from .image_errors import ImageRefused

MANIFEST_MAX = 4 << 20  # bytes of a manifest, an index or a configuration
LAYERS_MAX = 512
DEPTH_MAX = 200  # directories above an entry; a walk holds each of them open
NAME_MAX = 4096  # bytes of the path of an entry
HEADER_MAX = 1 << 20  # bytes of the headers of one entry
INDEX_DEPTH_MAX = 3  # indexes inside indexes


@dataclass
class UnpackBudget:
    """What the layers of one image may still take.

    Attributes:
        bytes_left: bytes of unpacked layers; the holes of sparse files count as well.
        entries_left: entries of archives.
    """

    bytes_left: int = 64 << 30
    entries_left: int = 4_000_000

    def take_bytes(self, count: int) -> None:
        """Counts unpacked bytes.

        Raises:
            ImageRefused: the image holds more than it may.
        """
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise ImageRefused("image: it unpacks to more bytes than an image may have here; a "
                               "larger `image_max_mib` in the settings allows it")

    def take_entry(self) -> None:
        """Counts an entry; raises as `take_bytes`."""
        self.entries_left -= 1
        if self.entries_left < 0:
            raise ImageRefused("image: it has more files than an image may have here (4000000)")
