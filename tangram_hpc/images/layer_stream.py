"""Reads the tar of a layer from a compressed file, in bounded memory.

A layer may be compressed by gzip, zstd or not at all. The stream counts and hashes what comes out,
and gives tarfile only as many bytes of headers for one entry as a real header can have: a header
may announce any size, and tarfile would read all of it into memory.
"""

from __future__ import annotations

import hashlib
import importlib
import zlib
from collections.abc import Callable
from typing import IO, Any

from .image_errors import ImageRefused
from .image_limits import HEADER_MAX, UnpackBudget

_PIECE = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

Decompress = Callable[[bytes], bytes]


class LayerStream:
    """The uncompressed bytes of a layer. It is a file for tarfile that only moves forward.

    Args:
        file: the compressed layer.
        budget: what the image may still take.

    Attributes:
        in_data: whether the content of an entry is being read, and not its headers.
    """

    def __init__(self, file: IO[bytes], budget: UnpackBudget) -> None:
        self.in_data = False
        self._file, self._budget = file, budget
        first = file.read(_PIECE)
        self._source = _source(file, first)
        self._ready = memoryview(b"")
        self._at = 0
        self._digest = hashlib.sha256()
        self._header = 0

    def next_entry(self) -> None:
        """Says that the headers of another entry follow."""
        self._header, self.in_data = 0, False

    def tell(self) -> int:
        """Returns how many bytes were read."""
        return self._at

    def seek(self, position: int) -> int:
        """Skips to a position that lies ahead.

        Raises:
            ImageRefused: it lies behind, as after an entry with a negative size.
        """
        if position < self._at:
            raise ImageRefused("image: a layer has an entry of a negative size")
        while self._at < position:
            if not self._take(min(_PIECE, position - self._at)):
                break
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes, fewer only at the end.

        Raises:
            ImageRefused: the headers of an entry are too large, or the layer is damaged.
        """
        if not self.in_data:
            self._header += size
            if size < 0 or self._header > HEADER_MAX:
                raise ImageRefused(f"image: a layer has an entry with more than {HEADER_MAX} bytes "
                                   "of headers")
        pieces = []
        while size > 0 and (piece := self._take(size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def drain(self) -> str:
        """Reads what follows the last entry; returns the digest of all bytes of the tar."""
        while self._take(_PIECE):
            pass
        return f"sha256:{self._digest.hexdigest()}"

    def _take(self, size: int) -> bytes:
        if not self._ready:
            fresh = self._source()
            self._digest.update(fresh)
            self._budget.take_bytes(len(fresh))
            self._ready = memoryview(fresh)
        piece, self._ready = bytes(self._ready[:size]), self._ready[size:]
        self._at += len(piece)
        return piece


def _source(file: IO[bytes], first: bytes) -> Callable[[], bytes]:
    """Returns a function that gives the next uncompressed bytes; none at the end."""
    if first.startswith(_GZIP):
        return _Gzip(file, first)
    if first.startswith(_ZSTD):
        return _zstd(file, first)
    rest = [first]
    return lambda: rest.pop() if rest else file.read(_PIECE)


class _Gzip:
    """Decompresses gzip, also several members one after the other, a bounded piece at a time."""

    def __init__(self, file: IO[bytes], first: bytes) -> None:
        self._file, self._given = file, first
        self._inflate = zlib.decompressobj(31)

    def __call__(self) -> bytes:
        try:
            while given := self._given or self._file.read(_PIECE):
                if self._inflate.eof:
                    given = given.lstrip(b"\0")  # padding, or another member
                    self._given = given
                    if not given:
                        continue
                    self._inflate = zlib.decompressobj(31)
                out = self._inflate.decompress(given, _PIECE)
                self._given = self._inflate.unused_data or self._inflate.unconsumed_tail
                if out:
                    return out
        except zlib.error as error:
            raise ImageRefused(f"image: a layer is not valid gzip ({error})") from None
        if not self._inflate.eof:
            raise ImageRefused("image: a layer ends in the middle of its compressed data")
        return b""


def _zstd(file: IO[bytes], first: bytes) -> Callable[[], bytes]:
    """Returns what `_source` returns for zstd, by Python's own module (from 3.14 on) or by the
    library `zstandard`."""
    whole: Any = _Joined(file, first)
    try:
        module = importlib.import_module("compression.zstd")
    except ImportError:
        try:
            module = importlib.import_module("zstandard")
        except ImportError:
            raise ImageRefused(
                "image: a layer is compressed by zstd, which this Python cannot read; install "
                "`zstandard` (the extra `images`), or push the image with gzip") from None
        reader = module.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
            whole, read_across_frames=True)
        wrong: type[Exception] = module.ZstdError
    else:
        reader, wrong = module.ZstdFile(whole), module.ZstdError

    def read() -> bytes:
        try:
            out: bytes = reader.read(_PIECE)
            return out
        except (wrong, EOFError) as error:
            raise ImageRefused(f"image: a layer is not valid zstd ({error})") from None

    return read


class _Joined:
    """A file whose first bytes have been read already."""

    def __init__(self, file: IO[bytes], first: bytes) -> None:
        self._file, self._first = file, first

    def read(self, size: int = -1) -> bytes:
        if self._first:
            piece, self._first = self._first[:size], self._first[size:]
            return piece
        return self._file.read(size)
