"""The store of images on a node: unpacked layers, and the root file systems made from them.

```
layers/HEX/tree, notes.json     an unpacked layer, by the digest of its uncompressed tar
layers/HEX/implied.json         a field of its notes that earlier releases, which may share the
                                store, do not know
images/HEX/whole-*, image.json  an image, by its digest; `used` has the time of its last use
images/HEX/root-*               the root file system of an image that an earlier release unpacked
layers/HEX/witness              is there for as long as no cleaner has taken files of the layer, and
images/HEX/witness              of the image: see below
names/HEX.json                  which digest a name had when it was pulled
locks/HEX                       makes sure that one process at a time pulls one image
drafts/RANDOM                   what is being made; locked by its maker
```

Where files keep the owners that they have in their image, `layers` and `images` have a suffix that
stands for the user's range of numbers.

Everything appears by one rename, so that no reader sees half of it. Whoever uses an image holds a
shared lock on its folder, and whoever removes it needs an exclusive one. The kernel gives locks up
when their process ends, so a process that is killed blocks nothing, and its drafts are removed by
the next one.

Sites have cleaners, which remove files that are old or were not read for some time. The files of an
image have the times that they have in its archive, and many are never read, so a cleaner takes some
of them and leaves others. Therefore each layer and image has a file that a cleaner which goes by
the age of files takes first: the witness is made before all others, its times of change and of use
are 0, and it is never opened or renamed. Without its witness a layer or an image counts as removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..atomic_file import replace_file
from ..errors import DISK_FULL
from ..sandbox.files import scratch
from . import owner_namespace
from .image_errors import ImageUnavailable
from .merge_layers import UnpackedLayer
from .unpack_layer import LayerNotes

_LISTS = ("names", "diff_ids", "env")  # fields that are tuples, which JSON returns as lists
_FOLDERS = ("layers", "images", "names", "locks", "drafts")
_OWNED = ("layers", "images")
_WITNESS = "witness"
_FRESH = "fresh"  # in a draft: the folder that is published
_WATCHED = "whole-"  # begins the names of root file systems that have a witness


@dataclass(frozen=True)
class StoredImage:
    """An image of a store.

    Attributes:
        digest: its digest.
        names: the names by which it was pulled.
        diff_ids: its layers; none if it was unpacked as a whole.
        env: variables that its programs expect, as NAME=VALUE.
        working_dir: the directory in which its programs start; empty for none.
        user: the user that it names; empty for none.
        size: bytes of its files.
        entries: how many files, links and directories its layers have.
        root: the name of the folder with its root file system. It is another one each time that the
            image is added: a sandbox that was built before the image was removed must not be taken
            for one of its successor.
    """

    digest: str
    names: tuple[str, ...] = ()
    diff_ids: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    size: int = 0
    entries: int = 0
    root: str = ""

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> StoredImage:
        """Makes an image from what `image.json` holds."""
        return cls(**{**record, **{name: tuple(record[name]) for name in _LISTS}})


def _suffix() -> str:
    """Returns the suffix of the folders that hold unpacked files. It stands for the user's range of
    numbers, because files with the numbers of another range are of no use."""
    users = owner_namespace.users() if os.geteuid() else None
    if users is None:
        return ""
    return f"-{hashlib.sha256(' '.join(users).encode()).hexdigest()[:8]}"


class NodeStore:
    """A store of images below a folder.

    Args:
        folder: the folder; it is made when it is missing.

    Raises:
        ImageUnavailable: it cannot be made, or others could write into it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._owners = _suffix()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.folder.stat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o022:
                raise ImageUnavailable(f"image_store {self.folder}: it belongs to somebody else, "
                                       "or others may write into it; name a folder of your own")
            for name in _FOLDERS:
                name += self._owners if name in _OWNED else ""
                (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ImageUnavailable(f"image_store {self.folder}: {error.strerror}; name a writable "
                                   "folder on a local disk") from None

    # ---- images ----

    def root_of(self, image: StoredImage) -> str:
        """The path of the root file system of an image."""
        return str(self._image(image.digest) / image.root)

    def find(self, digest: str) -> StoredImage | None:
        """Returns an image; None if it is not here, or a cleaner has taken files of it."""
        try:
            text = (self._image(digest) / "image.json").read_text()
            return StoredImage.of_record(json.loads(text)) if self.is_whole(digest) else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_whole(self, digest: str) -> bool:
        """Returns whether an image is here, and no cleaner has taken files of it, as far as can be
        told: the images of earlier releases have no witness.

        Raises:
            ImageUnavailable: the store cannot be read.
        """
        folder = self._image(digest)
        with self._naming_store():
            return (folder / _WITNESS).exists() or any(folder.glob("root-*"))

    def hold(self, digest: str) -> int:
        """Locks an image for use, and notes the time; returns the descriptor to close afterwards.
        Returns -1 if the image is not here or is just being removed, or if a cleaner has taken
        files of it.

        Raises:
            ImageUnavailable: it cannot be opened or locked.
        """
        folder = self._image(digest)
        with self._naming_store(), contextlib.ExitStack() as undo:
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                same = os.path.samestat(os.fstat(fd), os.stat(folder))
                if not (same and self.is_whole(digest)):
                    return -1
            except (BlockingIOError, FileNotFoundError):
                return -1
            with contextlib.suppress(OSError):  # an image can be used from a read-only store, too
                (folder / "used").touch()
            undo.pop_all()
            return fd

    def add(self, image: StoredImage, fill: Callable[[str], object]) -> None:
        """Adds an image.

        Args:
            image: what it is.
            fill: makes its root file system in the folder that it is given, which exists.
        """
        with self.draft() as draft:
            _bear_witness(draft)
            root = draft / f"{_WATCHED}{secrets.token_hex(4)}"
            root.mkdir(mode=0o755)
            os.chmod(root, 0o755)
            fill(str(root))
            replace_file(draft / "image.json", json.dumps(asdict(replace(image, root=root.name))))
            (draft / "used").touch()
            self._publish(draft, self._image(image.digest))

    def images(self) -> list[StoredImage]:
        """Returns all images, the least recently used first."""
        found = [(self._used(digest), digest) for digest in self._digests("images")]
        images = [self.find(digest) for _, digest in sorted(found)]
        return [image for image in images if image is not None]

    def in_use(self, digest: str) -> bool:
        """Whether a session of some worker uses an image."""
        try:
            fd = os.open(self._image(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def remove(self, digest: str) -> bool:
        """Removes an image, and the names that lead to it; returns False if it is in use.

        Raises:
            ImageUnavailable: the store cannot be written.
        """
        if not self._drop(self._image(digest)):
            return False
        for path in (self.folder / "names").iterdir():
            if self._name_record(path).get("digest") == digest:
                path.unlink(missing_ok=True)
        return True

    # ---- layers ----

    def layer(self, diff_id: str) -> UnpackedLayer | None:
        """Returns an unpacked layer; None if it is not here, or a cleaner has taken files of it. It
        is unpacked anew if an earlier release unpacked it, which made no witness."""
        return self._layer_found(diff_id) if (self._layer(diff_id) / _WITNESS).exists() else None

    def _layer_found(self, diff_id: str) -> UnpackedLayer | None:
        folder = self._layer(diff_id)
        try:
            notes = LayerNotes.from_json((folder / "notes.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        with contextlib.suppress(FileNotFoundError):  # an earlier release unpacked it
            notes.implied = json.loads((folder / "implied.json").read_text())
        return UnpackedLayer(str(folder / "tree"), notes)

    def add_layer(self, diff_id: str, fill: Callable[[str], LayerNotes]) -> UnpackedLayer:
        """Adds a layer; `fill` unpacks it into the folder that it is given, which is empty. What
        is left of a layer that is not whole gives way."""
        with self.draft() as draft:
            _bear_witness(draft)
            (draft / "tree").mkdir(mode=0o755)
            notes = fill(str(draft / "tree"))
            replace_file(draft / "implied.json", json.dumps(notes.implied))
            replace_file(draft / "notes.json", replace(notes, implied=[]).to_json())
            if self.layer(diff_id) is None:
                self._make_draft(self._layer(diff_id))
            self._publish(draft, self._layer(diff_id))
        return UnpackedLayer(str(self._layer(diff_id) / "tree"), notes)

    def layer_sizes(self) -> dict[str, int]:
        """Returns the bytes of each layer."""
        layers = {diff_id: self._layer_found(diff_id) for diff_id in self._digests("layers")}
        return {diff_id: layer.notes.size if layer is not None else 0
                for diff_id, layer in layers.items()}

    def prune_layers(self) -> int:
        """Removes the layers that no image has, unless a pull is under way; returns their bytes.

        Raises:
            ImageUnavailable: the store cannot be written.
        """
        with self._exclusive() as alone:
            if not alone:
                return 0
            used = {diff_id for image in self.images() for diff_id in image.diff_ids}
            freed = 0
            for diff_id, size in self.layer_sizes().items():
                if diff_id not in used:
                    self._drop(self._layer(diff_id))
                    freed += size
            return freed

    def size(self) -> int:
        """Returns the bytes of all layers, and of the images that were unpacked as a whole."""
        whole = sum(image.size for image in self.images() if not image.diff_ids)
        return whole + sum(self.layer_sizes().values())

    def shrink(self, bound: int, keep: str = "") -> list[StoredImage]:
        """Removes the least recently used images that nobody uses until the store has at most
        `bound` bytes; returns them. The image `keep` stays.
        """
        gone: list[StoredImage] = []
        if self.size() <= bound:
            return gone
        self.prune_layers()
        for image in self.images():
            if self.size() <= bound:
                break
            if image.digest != keep and self.remove(image.digest):
                gone.append(image)
                self.prune_layers()
        return gone

    # ---- names ----

    def digest_of_name(self, name: str) -> str:
        """Returns the digest that a name had when it was last pulled; empty if it never was."""
        digest = self._name_record(self._name(name)).get("digest")
        return digest if isinstance(digest, str) else ""

    def note_name(self, name: str, digest: str, about: str = "") -> None:
        """Records which digest a name stands for. `about` describes the source at that time (for a
        file its size and time), so that a later caller can tell whether it has changed.
        """
        replace_file(self._name(name), json.dumps(
            {"name": name, "digest": digest, "about": about}))

    def forget_name(self, name: str) -> None:
        """Removes a name; its image stays."""
        self._name(name).unlink(missing_ok=True)

    def about_name(self, name: str) -> str:
        """Returns the `about` that `note_name` recorded for a name; empty if there is none."""
        about = self._name_record(self._name(name)).get("about")
        return about if isinstance(about, str) else ""

    def names(self) -> dict[str, list[str]]:
        """Returns the names of each digest."""
        found: dict[str, list[str]] = {}
        for path in sorted((self.folder / "names").iterdir()):
            record = self._name_record(path)
            if "name" in record and "digest" in record:
                found.setdefault(str(record["digest"]), []).append(str(record["name"]))
        return found

    # ---- drafts and locks ----

    @contextlib.contextmanager
    def pulling(self, name: str) -> Iterator[None]:
        """Holds the lock for pulling one image, and keeps layers from being pruned meanwhile.
        Blocks while another process pulls the same image.
        """
        with (self._locked(hashlib.sha256(name.encode()).hexdigest(), fcntl.LOCK_EX),
              self._locked("all", fcntl.LOCK_SH)):
            yield

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """A folder that is gone at the end, with everything that was not moved out of it."""
        draft = self.folder / "drafts" / secrets.token_hex(16)
        with self._naming_store():
            draft.mkdir(mode=0o700)
            fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield draft
        finally:
            os.close(fd)
            scratch.remove(str(draft))

    def sweep_drafts(self) -> int:
        """Removes the drafts of processes that are dead, and what cleaners have left of images;
        returns how many."""
        for digest in self._digests("images"):
            if not self.is_whole(digest):
                self._make_draft(self._image(digest))
        count = 0
        for draft in (self.folder / "drafts").iterdir():
            try:
                fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                # a draft exists for a moment before its maker has locked it
                if time.time() - os.fstat(fd).st_mtime > 1.0:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    count += scratch.remove(str(draft))
            except BlockingIOError:
                pass
            finally:
                os.close(fd)
        return count

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked("all", fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def _publish(self, draft: Path, target: Path) -> None:
        """Moves the content of a draft to its final place, unless another process has put the same
        content there first.
        """
        fresh = draft / _FRESH
        for entry in [path for path in draft.iterdir() if path != fresh]:
            os.rename(entry, fresh / entry.name)
        try:
            os.rename(fresh, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _make_draft(self, folder: Path) -> None:
        """Makes a draft of what is left of a layer or an image, if there is anything. It is removed
        when no session uses it."""
        with contextlib.suppress(OSError):  # another process has done it, or the store is read-only
            os.rename(folder, self.folder / "drafts" / secrets.token_hex(16))

    def _drop(self, folder: Path) -> bool:
        """Removes an image or a layer; returns False if it is in use. Its folder becomes a draft
        itself, because a full disk has no room for a new one.
        """
        draft = self.folder / "drafts" / secrets.token_hex(16)
        with self._naming_store(), contextlib.ExitStack() as stack:
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(folder, draft)
            except BlockingIOError:
                return False
            except FileNotFoundError:  # another process has removed it
                return True
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                draft = folder  # some file systems cannot rename when a quota is used up
                for record in (_WITNESS, "image.json", "notes.json"):  # nobody finds it any more
                    (folder / record).unlink(missing_ok=True)
            scratch.remove(str(draft))
        return True

    def _image(self, digest: str) -> Path:
        return self.folder / f"images{self._owners}" / digest.removeprefix("sha256:")

    def _layer(self, diff_id: str) -> Path:
        return self.folder / f"layers{self._owners}" / diff_id.removeprefix("sha256:")

    def _name(self, name: str) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _digests(self, kind: str) -> list[str]:
        folder = self.folder / f"{kind}{self._owners}"
        return [f"sha256:{path.name}" for path in sorted(folder.iterdir())]

    def _used(self, digest: str) -> int:
        try:
            return (self._image(digest) / "used").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _name_record(self, path: Path) -> dict[str, object]:
        try:
            record = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with self._naming_store():
                fd = os.open(self.folder / "locks" / name,
                             os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                fcntl.flock(fd, how)
            yield

    @contextlib.contextmanager
    def _naming_store(self) -> Iterator[None]:
        """Names the store in the error of a system call that fails in the block."""
        try:
            yield
        except BlockingIOError:  # a lock that another process holds
            raise
        except OSError as error:
            raise ImageUnavailable(f"image_store {self.folder}: {error.strerror}") from None


def _bear_witness(draft: Path) -> None:
    """Makes the witness of what a draft will become, in the folder that is published: to rename it
    later would change its ctime, and it would be younger than the other files."""
    witness = draft / _FRESH / _WITNESS
    witness.parent.mkdir(mode=0o700)
    witness.write_text("whole")
    os.utime(witness, ns=(0, 0))
