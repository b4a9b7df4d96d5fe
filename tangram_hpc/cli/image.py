"""`tangram image`: fills, lists and empties the store of images of this node, and a site's folder.

Sessions pull what they need by themselves. This verb is for whoever wants it done before: a prolog,
a batch script, or an administrator. It acts on the folder of the setting `image_store`, or of
`--store`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .helpers.end_signals import ends_in_order
from .helpers.printable import printable
from .helpers.progress_bar import ProgressBar

if TYPE_CHECKING:
    from ..images.node_store import NodeStore
    from ..images.pull import PullSettings


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("image", help="pull, list and remove images of sessions")
    subs = p.add_subparsers(dest="image_verb", metavar="VERB", required=True)
    pull = subs.add_parser("pull", help="make images ready in the store of this node")
    pull.add_argument("names", nargs="+", metavar="IMAGE")
    pull.add_argument("--again", action="store_true", help="ask the registry what a tag means now")
    load = subs.add_parser("import", help="put an image of a file into the store, under a name")
    load.add_argument("path", metavar="FILE", help="a .sif file, a squashfs, an archive or an "
                                                         "OCI layout")
    load.add_argument("--name", default="", metavar="NAME", help="a name that sessions may use for "
                                                                 "it, such as localhost/app:1")
    subs.add_parser("list", help="list the images of the store")
    remove = subs.add_parser("remove", help="remove images from the store")
    remove.add_argument("names", nargs="+", metavar="IMAGE", help="a name or a digest")
    prune = subs.add_parser("prune", help="remove images that no session uses")
    prune.add_argument("--keep-mib", type=int, default=0, metavar="MIB",
                       help="stop when the store holds at most so much (default: 0)")
    publish = subs.add_parser("publish", help="fetch images into a folder that other nodes read")
    publish.add_argument("names", nargs="+", metavar="IMAGE")
    publish.add_argument("--into", required=True, metavar="FOLDER",
                         help="the folder, on a shared file system; see `image_shares`")
    publish.add_argument("--platform", action="append", default=[], metavar="OS/ARCH",
                         help="fetch it for this platform too, such as linux/arm64")
    build = subs.add_parser("build", help="build an image by buildah or podman, and import it")
    build.add_argument("context", metavar="FOLDER", help="the folder with the Dockerfile")
    build.add_argument("-f", "--file", default="", metavar="FILE", help="another Dockerfile")
    build.add_argument("--name", required=True, metavar="NAME", help="a name for sessions to use")
    for each in subs.choices.values():
        each.add_argument("--store", default="", metavar="FOLDER",
                          help="the store (default: the setting image_store)")
        each.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs a verb on the store; returns the exit status."""
    with ends_in_order():  # drafts of images are removed, and what a builder has made
        return _go(args)


def _go(args: argparse.Namespace) -> int:
    from ..app.worker import pull_settings
    from ..config.settings import load_config
    from ..errors import InvalidInput
    from ..images.node_store import NodeStore

    config = load_config(os.environ, {"image_store": os.path.abspath(args.store)}
                         if args.store else None)
    os.umask(0o022)  # other users read images, and published folders
    if args.image_verb == "publish" and not config.image_store:
        with tempfile.TemporaryDirectory() as folder:
            return _publish(args, pull_settings(config, Path(folder)))
    if not config.image_store:
        raise InvalidInput("--store: the setting `image_store` is empty, so each worker has a "
                           "store of its own and removes it at its end; set it, or name a folder")
    settings = pull_settings(config, Path(), _job_share())
    if args.image_verb == "publish":
        return _publish(args, settings)
    if args.image_verb == "pull":
        return _pull(args, settings)
    if args.image_verb == "import":
        return _import(args, settings)
    if args.image_verb == "build":
        return _build(args, settings)
    if not os.path.lexists(settings.store):
        return _on_no_store(args, settings.store)
    store = NodeStore(settings.store)
    if args.image_verb == "list":
        return _list(args, store)
    return _remove(args, store) if args.image_verb == "remove" else _prune(args, store)


def _on_no_store(args: argparse.Namespace, missing: str) -> int:
    """Runs a verb that fetches nothing on a store that is missing, without making the folder: it
    would belong to whoever looks, and the workers of its user could not write into it.
    """
    from ..errors import InvalidInput
    from ..images.node_store import NodeStore

    if args.image_verb == "remove":
        raise InvalidInput(f"image: {args.names[0]} is not in the store {missing}, which does not "
                           "exist; name another one with --store")
    with tempfile.TemporaryDirectory() as folder:
        empty = NodeStore(folder)
        return _list(args, empty) if args.image_verb == "list" else _prune(args, empty)


def _job_share() -> str:
    """The folder in which the nodes of the job share what they fetch; empty outside of a job, and
    where its broker has not started or has ended."""
    from ..app.broker_location import find_access
    from ..errors import AccessError
    from ..storage.access import read_access

    try:
        store = read_access(find_access(os.environ)).store
        os.makedirs(store, mode=0o700, exist_ok=True)  # this may be the first of its payloads
    except (AccessError, OSError):
        return ""
    return f"{store}/images"


def _pull(args: argparse.Namespace, settings: PullSettings) -> int:
    from ..images.pull import pull

    done = []
    for name in args.names:
        with ProgressBar(f"image pull {printable(name)}: layers ready") as progress:
            found = pull(name, settings, os.environ, args.again,
                         partial(_tell_layer, progress))
        done.append({"name": name, "digest": found.digest, "folder": found.folder})
        if not args.json:
            print(f"{found.digest or '-'} {name}", flush=True)
    if args.json:
        print(json.dumps({"images": done}))
    return 0


def _tell_layer(progress: ProgressBar, ready: int, total: int) -> None:
    progress.at(ready, f"layer {ready + 1} of {total}")


def _import(args: argparse.Namespace, settings: PullSettings) -> int:
    from ..images.pull import import_image

    path = args.path
    if ":" not in path or path.startswith(("./", "../")):
        path = os.path.abspath(path)
    digest = import_image(path, args.name, settings, os.environ)
    print(json.dumps({"digest": digest, "name": args.name}) if args.json
          else f"{digest} {args.name or args.path}")
    return 0


def _build(args: argparse.Namespace, settings: PullSettings) -> int:
    from ..images.image_builder import build_image, find_builder
    from ..images.pull import import_image

    find_builder()
    with tempfile.TemporaryDirectory(prefix="tangram-build-") as folder:
        archive = f"{folder}/image.tar"
        build_image(args.context, args.file, archive)
        digest = import_image(f"oci-archive:{archive}", args.name, settings, os.environ)
    print(json.dumps({"digest": digest, "name": args.name}) if args.json
          else f"{digest} {args.name}")
    return 0


def _list(args: argparse.Namespace, store: NodeStore) -> int:
    names, images = store.names(), store.images()
    rows = [{"digest": image.digest, "names": names.get(image.digest, []), "bytes": image.size,
             "layers": len(image.diff_ids), "in_use": store.in_use(image.digest)}
            for image in images]
    if args.json:
        print(json.dumps({"images": rows, "bytes": store.size()}))
        return 0
    print(f"{'Digest':<19} {'MiB':>8} {'Layers':>6} {'In use':>6}  Names")
    for row, image in zip(rows, images, strict=True):
        print(f"{image.digest[:19]:<19} {image.size / 2**20:>8.1f} {len(image.diff_ids):>6} "
              f"{'yes' if row['in_use'] else 'no':>6}  {', '.join(names.get(image.digest, []))}")
    print(f"{'all':<19} {store.size() / 2**20:>8.1f}")
    return 0


def _remove(args: argparse.Namespace, store: NodeStore) -> int:
    from ..errors import InvalidInput, TangramError

    digests = [_digest(name, store) for name in args.names]
    for name, digest in zip(args.names, digests, strict=True):
        if not digest:
            raise InvalidInput(f"image: {name} is not in the store {store.folder}; `tangram image "
                               "list` prints what is")
    for name, digest in zip(args.names, digests, strict=True):
        if not store.remove(digest):
            raise TangramError(f"image: {name} is used by a session on this node; it can be "
                               "removed when that has ended")
    freed = store.prune_layers()
    print(json.dumps({"removed": digests, "freed_bytes": freed}) if args.json
          else f"removed {len(digests)}, freed {freed / 2**20:.1f} MiB")
    return 0


def _digest(name: str, store: NodeStore) -> str:
    """The digest of an image of the store, by a name, or by at least 12 characters of the digest.
    """
    from ..domain.image_name import parse_image_name

    short = name.removeprefix("sha256:")
    if len(short) >= 12 and all(c in "0123456789abcdef" for c in short):
        return next((i.digest for i in store.images()
                     if i.digest.removeprefix("sha256:").startswith(short)), "")
    known = store.names()
    parsed = parse_image_name(name)
    return next((digest for digest, names in known.items()
                 if parsed.full in names or name in names), "")


def _prune(args: argparse.Namespace, store: NodeStore) -> int:
    before = store.size()
    store.sweep_drafts()
    gone = store.shrink(args.keep_mib << 20)
    store.prune_layers()
    freed = before - store.size()
    print(json.dumps({"removed": [image.digest for image in gone], "freed_bytes": freed})
          if args.json else f"removed {len(gone)}, freed {freed / 2**20:.1f} MiB")
    return 0


def _publish(args: argparse.Namespace, settings: PullSettings) -> int:
    from ..images.pull import publish

    done = []
    for name in args.names:
        digest = publish(name, os.path.abspath(args.into), settings, os.environ, args.platform)
        done.append({"name": name, "digest": digest})
        if not args.json:
            print(f"{digest} {name}", flush=True)
    if args.json:
        print(json.dumps({"images": done}))
    return 0
