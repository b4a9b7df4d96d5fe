"""Makes an image ready in the store of a node: finds it, fetches what is missing, unpacks it.

This is what a worker's helper process and `tangram image pull` run. It blocks, and may take
minutes. Whoever kills it leaves nothing but a draft, which the next pull removes.

A name of a registry is looked up in this order: its digest, if it has one; what the job's folder or
the site's store says of it; the registry; and, if the registry does not answer, what this node knew
last. So all nodes of a job use one image for one name, and a site without a way out needs no
registry.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from ..domain.image_name import PATH, REGISTRY, ImageName, parse_image_name
from ..errors import TangramError
from . import owner_namespace
from .found_image import FoundImage, find_image
from .image_errors import ImageRefused, ImageUnavailable, RegistryUnavailable, of_os_error
from .image_limits import MANIFEST_MAX, UnpackBudget
from .local_images import archive_kind, file_digest, find_local_image, folder_kind
from .manifests import BlobRef, digest_of, is_digest, parse_manifest, platform_of
from .merge_layers import UnpackedLayer, merge_layers
from .node_store import NodeStore, StoredImage
from .registry import RegistryImage
from .shared_blobs import SharedBlobs
from .sif import SIF, SQUASHFS, sif_config, squashed_kind, unpack_squashed
from .unpack_layer import LayerNotes, unpack_layer

IMPORTED = "imported"  # noted with a name that a person gave to an image of a file
OnLayer = Callable[[int, int], object]


@dataclass(frozen=True)
class PullSettings:
    """What a site or a user says about pulling.

    Attributes:
        store: the folder of the node's store.
        shares: folders of blobs that are read, the first one first; missing ones are passed over.
        job_share: a folder of blobs that is also written; empty for none.
        insecure: registries that may be spoken to without encryption.
        registries: whether registries may be asked at all.
        max_mib: MiB that an image may unpack to.
        store_mib: MiB that the store may hold; 0 for no bound.
    """

    store: str
    shares: tuple[str, ...] = ()
    job_share: str = ""
    insecure: tuple[str, ...] = ()
    registries: bool = True
    max_mib: int = 64 << 10
    store_mib: int = 0


@dataclass(frozen=True)
class PulledImage:
    """An image that is ready.

    Attributes:
        folder: its root file system.
        digest: its digest; empty for a folder that was named as it is.
        image: what the store knows of it; None for a folder that was named as it is.
    """

    folder: str
    digest: str = ""
    image: StoredImage | None = field(default=None, compare=False)


def pull(text: str, settings: PullSettings, environ: Mapping[str, str], again: bool = False,
         on_layer: OnLayer = lambda ready, total: None) -> PulledImage:
    """Makes an image ready.

    Args:
        text: its name.
        settings: what a site or a user says about pulling.
        environ: the user's environment, for credentials and proxies.
        again: whether a tag is looked up anew, even where this node, job or site knows it.
        on_layer: called before each layer with how many are ready, and how many there are.

    Raises:
        InvalidInput: it is no name of an image.
        ImageRefused: it can never be used as it is.
        ImageUnavailable: it cannot be had now.
    """
    name = parse_image_name(text)
    if name.kind == PATH:
        seen = _path(name)
        if seen is None:
            return PulledImage(name.path)
        name = seen
    store = NodeStore(settings.store)
    store.sweep_drafts()
    try:
        with store.pulling(name.full):
            if name.kind in (SIF, SQUASHFS):
                digest = _pull_squashed(name, store, settings)
            elif name.kind == REGISTRY:
                digest = _pull_registry(name, store, settings, environ, again, on_layer)
            else:
                found = find_local_image(name, platform_of(platform.machine()))
                digest = _unpack(found, name, store, settings, on_layer)
        if settings.store_mib:
            store.shrink(settings.store_mib << 20, keep=digest)
    except RegistryUnavailable:
        raise
    except (OSError, TangramError) as error:
        with contextlib.suppress(OSError, TangramError):
            store.prune_layers()  # its layers would take the disk of images that can be had
        if isinstance(error, OSError):
            raise of_os_error(name.full, error) from None
        raise
    image = store.find(digest)
    if image is None:
        raise ImageUnavailable(f"image: {text} was removed from the store while it was pulled")
    return PulledImage(store.root_of(image), digest, image)


def _path(name: ImageName) -> ImageName | None:
    """Sees what is at a path; None for a folder with a root file system."""
    path = name.path
    try:
        os.stat(path)
    except OSError as error:
        raise of_os_error(path, error) from None
    if os.path.isdir(path):
        kind = folder_kind(path)
        return ImageName(name.text, kind, path) if kind else None
    return ImageName(name.text, squashed_kind(path) or archive_kind(path), path)


def _pull_squashed(name: ImageName, store: NodeStore, settings: PullSettings) -> str:
    about = os.stat(name.path)
    seen = f"{about.st_dev}.{about.st_ino}.{about.st_size}.{about.st_mtime_ns}"
    known = store.digest_of_name(name.full)
    if known and store.about_name(name.full) == seen and store.find(known) is not None:
        return known
    digest = file_digest(name.path)
    if store.find(digest) is None:
        with store.draft() as draft:
            size = unpack_squashed(name.path, str(draft / "root"), platform_of(platform.machine()),
                                   _budget(settings))
            config = sif_config(name.path)

            def fill(root: str) -> None:
                os.rmdir(root)
                os.rename(draft / "root", root)

            store.add(StoredImage(digest, env=config.env, working_dir=config.working_dir,
                                  size=size), fill)
    store.note_name(name.full, digest, seen)
    return digest


def _budget(settings: PullSettings) -> UnpackBudget:
    return UnpackBudget(settings.max_mib << 20)


def _unpack(found: FoundImage, name: ImageName, store: NodeStore, settings: PullSettings,
            on_layer: OnLayer) -> str:
    """Unpacks the layers that the store does not have, and merges them; returns the digest."""
    if store.find(found.digest) is None:
        budget, layers = _budget(settings), list[UnpackedLayer]()
        for diff_id, opened in zip(found.config.diff_ids, found.layers, strict=True):
            on_layer(len(layers), len(found.layers))
            layer = store.layer(diff_id)
            if layer is None:
                with opened() as file:
                    layer = store.add_layer(
                        diff_id, lambda folder, file=file, diff_id=diff_id:  # type: ignore[misc]
                        _checked(file, folder, diff_id, budget))
            else:
                budget.take_bytes(layer.notes.size)
            layers.append(layer)
        config = found.config
        image = StoredImage(found.digest, (), config.diff_ids, config.env, config.working_dir,
                            config.user, sum(layer.notes.size for layer in layers),
                            sum(layer.notes.entries for layer in layers))
        store.add(image, lambda root: owner_namespace.as_root(
            lambda: merge_layers(layers, root)))
    store.note_name(name.full, found.digest)
    return found.digest


def _checked(file: IO[bytes], folder: str, diff_id: str, budget: UnpackBudget) -> LayerNotes:
    def work() -> tuple[str, str, dict[str, int]]:
        notes, digest = unpack_layer(file, folder, budget, owner_namespace.users() is not None)
        return notes.to_json(), digest, vars(budget)

    text, digest, left = owner_namespace.as_root(work)
    vars(budget).update(left)
    notes = LayerNotes.from_json(text)
    if digest != diff_id:
        raise ImageRefused(f"image: a layer has the digest {digest}, and the configuration says "
                           f"{diff_id}")
    return notes


# ---- registries ----


def _pull_registry(name: ImageName, store: NodeStore, settings: PullSettings,
                   environ: Mapping[str, str], again: bool, on_layer: OnLayer) -> str:
    if not again and store.about_name(name.full) == IMPORTED:
        known = store.digest_of_name(name.full)
        if store.find(known) is not None:
            return known
    source = RegistrySource(name, settings, environ)
    digest = name.digest or source.digest(store, again)
    at = f"{name.registry}/{name.repository}@{digest}"
    # an index has another digest than the image for this platform; either may be asked for
    known = digest if store.find(digest) is not None else store.digest_of_name(at)
    if not known or store.find(known) is None:
        found = find_image(source, digest, platform_of(platform.machine()))
        known = _unpack(found, name, store, settings, on_layer)
    store.note_name(at, known)
    store.note_name(name.full, known, digest)
    return known


class RegistrySource:
    """Manifests and blobs of one image: from the shared folders, else from its registry.

    Args:
        name: the image.
        settings: which folders there are, and which registries may be asked.
        environ: the user's environment.
    """

    def __init__(self, name: ImageName, settings: PullSettings, environ: Mapping[str, str]) -> None:
        self._name, self._settings = name, settings
        self._registry = RegistryImage(name, environ, settings.insecure)
        self._job = SharedBlobs(settings.job_share, True) if settings.job_share else None
        shares = [SharedBlobs(path, False) for path in settings.shares if os.path.isdir(path)]
        self._shares = [self._job, *shares] if self._job is not None else shares
        self._scratch = settings.store

    def digest(self, store: NodeStore, again: bool) -> str:
        """Returns the digest of the name's tag, and lets the rest of the job use the same.

        Raises:
            ImageRefused: there is no such image.
            ImageUnavailable: the registry does not answer, and nobody knows the tag.
        """
        full = self._name.full
        known = next((found for share in self._shares if (found := share.digest_of_name(full))), "")
        if not known or again:
            known = self._ask(store, again)
        return self._job.pin(full, known, again) if self._job is not None else known

    def _ask(self, store: NodeStore, again: bool) -> str:
        full = self._name.full
        known = "" if again else store.about_name(full)
        known = known if is_digest(known) else ""
        if not self._settings.registries:
            if known:
                return known
            raise ImageRefused(f"image: {full} is in no store here, and the setting "
                               "`image_registries` forbids to ask its registry")
        try:
            data, digest = self._registry.manifest(self._name.tag)
        except ImageUnavailable:
            if known:
                return known
            raise
        parse_manifest(data)
        if self._job is not None:
            self._job.put(data)
        return digest

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """See `ImageSource`."""
        for share in self._shares:
            file = share.find(BlobRef(reference, 0))
            if file is not None:
                with file:
                    data = file.read(MANIFEST_MAX + 1)
                if digest_of(data) == reference:
                    return data, reference
        self._may_ask(reference)
        data, digest = self._registry.manifest(reference)
        if self._job is not None:
            self._job.put(data)
        return data, digest

    def open_blob(self, blob: BlobRef) -> IO[bytes]:
        """See `ImageSource`."""
        for share in self._shares:
            if (file := share.find(blob)) is not None:
                return file
        self._may_ask(blob.digest)
        if self._job is not None:
            return self._job.get(blob, lambda file: self._registry.blob(blob, file))
        file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 - the caller closes it
        try:
            self._registry.blob(blob, file)
            file.seek(0)
            return file
        except BaseException:
            file.close()
            raise

    def _may_ask(self, digest: str) -> None:
        if not self._settings.registries:
            raise ImageRefused(f"image: {digest} of {self._name.full} is in no store here, and the "
                               "setting `image_registries` forbids to ask its registry")


def import_image(path: str, text: str, settings: PullSettings, environ: Mapping[str, str]) -> str:
    """Puts the image of a file into the store; returns its digest.

    Args:
        path: the file or OCI layout, as `image` of a session would name it.
        text: a name of the form of a registry's, which leads to the image from now on; empty for
            none. No registry is asked for it.
        settings: where the store is.
        environ: the user's environment.

    Raises:
        InvalidInput: a name is wrong.
        ImageRefused: the image can never be used as it is.
        ImageUnavailable: it cannot be read or written now.
    """
    name = parse_image_name(text) if text else None
    if name is not None and (name.kind != REGISTRY or name.digest):
        raise ImageRefused(f"--name: {text} has not the form [registry/]name[:tag]")
    done = pull(path, settings, environ)
    if not done.digest:
        raise ImageRefused(f"image: {path} is a folder with a root file system; sessions use it as "
                           "it is")
    if name is not None:
        store = NodeStore(settings.store)
        store.note_name(name.full, done.digest, IMPORTED)
        file = parse_image_name(path)
        store.forget_name((_path(file) or file if file.kind == PATH else file).full)
    return done.digest


def publish(text: str, folder: str, settings: PullSettings, environ: Mapping[str, str],
            platforms: Sequence[str] = ()) -> str:
    """Fetches an image of a registry into a folder of blobs that others read; returns its digest.

    Args:
        text: its name.
        folder: the folder; it is made when it is missing.
        settings: what a site says about pulling.
        environ: the user's environment.
        platforms: platforms besides this machine's, such as `linux/arm64`.

    Raises:
        InvalidInput: it is no name of an image in a registry.
        ImageRefused: it can never be used as it is.
        ImageUnavailable: it cannot be had now, or the folder cannot be written.
    """
    name = parse_image_name(text)
    if name.kind != REGISTRY:
        raise ImageRefused(f"image: {text} is no image of a registry; files and folders on a "
                           "shared file system are named as they are")
    # what another shared folder has must be in this one, too: its readers may have no other
    shared = replace(settings, shares=(), job_share=folder)
    source, registry = RegistrySource(name, shared, environ), RegistryImage(
        name, environ, settings.insecure)
    blobs = SharedBlobs(folder, True)
    digest = name.digest or registry.manifest(name.tag)[1]
    for wanted in {platform_of(platform.machine()): None, **dict.fromkeys(platforms)}:
        found = find_image(source, digest, wanted)
        for opened in found.layers:
            opened().close()
    blobs.pin(name.full, digest, again=True)
    return digest
