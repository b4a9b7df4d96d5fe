"""Blobs of images on a file system that several nodes see, so that one node fetches for all.

```
blobs/HEX             a manifest, configuration or compressed layer, by its digest
blobs/HEX.claim       one process fetches this blob; it touches the file every few seconds
blobs/HEX.part-RANDOM what it has fetched
names/HEX.json        which digest a name has for everybody who uses this folder
```

A job has such a folder beside its payloads: the first node that needs a blob fetches it, the others
wait for it, and all nodes agree on what a tag means until the job ends. A site may have one that
its users only read. Locks of shared file systems do not always reach other nodes, so a claim is
only a hint that saves work: a blob appears by one rename after its digest was checked, and two
processes that fetch the same blob do no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ..atomic_file import replace_file
from .image_errors import ImageUnavailable
from .manifests import BlobRef, digest_of, is_digest

BEAT_S = 3.0  # seconds between two signs of life of a process that fetches
STALE_S = 15.0  # a process without a sign of life for so long is dead, or its node is
_LOOK_S = 0.2
_LOOK_MAX_S = 2.0

Fetch = Callable[[IO[bytes]], None]


class SharedBlobs:
    """A folder of blobs.

    Args:
        folder: the folder.
        writable: whether blobs and names may be added; the folder is then made when it is missing.
        stale_s: seconds without a sign of life after which another process takes over.

    Raises:
        ImageUnavailable: it cannot be made, or somebody else could change what is in it.
    """

    def __init__(self, folder: str | Path, writable: bool, stale_s: float = STALE_S) -> None:
        self.folder, self.writable, self._stale_s = Path(folder), writable, stale_s
        try:
            if writable:
                for each in (self.folder, self.folder / "blobs", self.folder / "names"):
                    each.mkdir(mode=0o755, parents=True, exist_ok=True)
            about = self.folder.stat()
        except OSError as error:
            raise ImageUnavailable(f"image_share {self.folder}: {error.strerror}") from None
        if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022:
            raise ImageUnavailable(
                f"image_share {self.folder}: it belongs neither to you nor to root, or others may "
                "write into it; what is in it could be anybody's")

    def find(self, blob: BlobRef) -> IO[bytes] | None:
        """Opens a blob; None if it is not here."""
        try:
            file = self._blob(blob.digest).open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageUnavailable(f"image: {self._blob(blob.digest)}: {error.strerror}") from None
        if blob.size and os.fstat(file.fileno()).st_size != blob.size:
            file.close()
            return None
        return file

    def get(self, blob: BlobRef, fetch: Fetch) -> IO[bytes]:
        """Opens a blob, after it was fetched by this process or another one.

        Args:
            blob: the blob.
            fetch: writes the blob into a file and checks its digest, or raises.

        Raises:
            ImageUnavailable: the folder cannot be written.
        """
        claim, look = Path(f"{self._blob(blob.digest)}.claim"), _LOOK_S
        seen, since = 0, time.monotonic()
        while True:
            if (found := self.find(blob)) is not None:
                return found
            try:
                os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                break
            except FileExistsError:
                pass
            except OSError as error:
                raise ImageUnavailable(f"image_share {self.folder}: {error.strerror}") from None
            sign = _mtime_ns(claim)
            if sign != seen:
                seen, since = sign, time.monotonic()
            elif time.monotonic() - since > self._stale_s:
                claim.unlink(missing_ok=True)
                continue
            time.sleep(look)
            look = min(_LOOK_MAX_S, look * 1.5)
        with _kept_alive(claim):
            return self._fetched(blob, fetch)

    def put(self, data: bytes) -> None:
        """Adds a small blob."""
        path = self._blob(digest_of(data))
        if self.writable and not path.exists():
            replace_file(path, data, 0o644)

    def digest_of_name(self, name: str) -> str:
        """Returns the digest that a name has here; empty if it has none."""
        try:
            record = json.loads(self._name(name).read_text())
            digest = record.get("digest") if isinstance(record, dict) else ""
        except (FileNotFoundError, ValueError):
            return ""
        except OSError as error:
            raise ImageUnavailable(f"image_share {self.folder}: {error.strerror}") from None
        return str(digest) if is_digest(digest) else ""

    def pin(self, name: str, digest: str, again: bool = False) -> str:
        """Gives a name its digest here, unless it has one; returns the digest that holds.

        Args:
            name: the full name.
            digest: the digest.
            again: whether an earlier digest is replaced.
        """
        path, text = self._name(name), json.dumps({"name": name, "digest": digest})
        if again:
            replace_file(path, text, 0o644)
            return digest
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            draft.write_text(text)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        except OSError as error:
            raise ImageUnavailable(f"image_share {self.folder}: {error.strerror}") from None
        finally:
            draft.unlink(missing_ok=True)
        return self.digest_of_name(name) or digest

    def _fetched(self, blob: BlobRef, fetch: Fetch) -> IO[bytes]:
        path = self._blob(blob.digest)
        part = Path(f"{path}.part-{secrets.token_hex(8)}")
        for old in path.parent.glob(f"{path.name}.part-*"):  # of a process that died
            old.unlink(missing_ok=True)
        try:
            with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644),
                      "w+b") as file:
                fetch(file)
                file.flush()
                os.rename(part, path)
            return path.open("rb")
        except OSError as error:
            raise ImageUnavailable(f"image_share {self.folder}: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.removeprefix("sha256:")

    def _name(self, name: str) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"


@contextlib.contextmanager
def _kept_alive(claim: Path) -> Iterator[None]:
    """Touches a claim while the block runs, and removes it afterwards."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(claim)

    thread = threading.Thread(target=beat, name="tangram-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        claim.unlink(missing_ok=True)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
