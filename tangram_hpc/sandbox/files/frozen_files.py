"""Freezes the files of a session in a folder that never changes again, and lets other sessions
begin with them.

What a session changed in its image becomes a layer, which any number of overlays can have below
their own changes. So a session that begins with the layer copies none of it. The session's
directory and its temporary directory are copied, by reference (reflink) where the file system can.
Where the root is a copy of the image, the whole root is copied too.

Nothing may run in a scratch directory while it is frozen. No link in it is followed.
"""

from __future__ import annotations

import os
import stat

import msgspec

from ..run_program import run_program
from . import root_record, scratch
from .root_record import RootRecord


class Unfrozen(Exception):
    """The files could not be frozen; the text is one line that says why."""


def freeze(origin: str, folder: str) -> int:
    """Freezes what a scratch directory holds; returns how much space that takes, in MiB. Blocks.

    Args:
        origin: the scratch directory.
        folder: the new folder, in a private directory. It is removed when this fails.

    Raises:
        Unfrozen: not everything could be copied, or the root has too many layers.
    """
    try:
        _freeze(origin, folder)
        return size_mib(folder)
    except scratch.Uncopied as error:
        scratch.remove(folder)
        raise Unfrozen(str(error).removeprefix("fork: ")) from None
    except OSError as error:
        scratch.remove(folder)
        raise Unfrozen(scratch.why_not(error)) from None
    except Unfrozen:
        scratch.remove(folder)
        raise


def _freeze(origin: str, folder: str) -> None:
    record = root_record.recorded(origin)
    scratch.make(folder)
    for part in (scratch.home, scratch.tmp):
        scratch.copy_part(origin, f"{part(origin)}/.", part(folder))
    if record is None:
        return
    scratch.copy_users(origin, folder)
    if record.way == "copy":
        scratch.copy_part(origin, scratch.changes(origin), scratch.changes(folder))
        return root_record.keep(folder, record)
    changed = (_has_entries(scratch.changes(origin))
               or _root_mode(scratch.changes(origin)) != _first_mode(record))
    above = [scratch.changes(origin)] if changed else []
    layers = []
    for layer in (*above, *record.layers):
        if layer.startswith(f"{origin}/"):  # this layer is removed with the session, so copy it
            target = f"{folder}/layer-{os.urandom(8).hex()}"
            scratch.copy_part(origin, layer, target)
            layer = target
        layers.append(layer)
    if len(layers) > root_record.LAYERS_MAX:
        raise Unfrozen(f"its root has {len(layers)} layers of snapshots, and at most "
                       f"{root_record.LAYERS_MAX} are possible; begin from an earlier snapshot")
    root_record.keep(folder, msgspec.structs.replace(record, layers=tuple(layers)))


def _has_entries(folder: str) -> bool:
    """Returns whether something is in a folder; a folder that is closed to this user counts as
    full."""
    try:
        return bool(os.listdir(folder))
    except PermissionError:
        return True


def _root_mode(changes: str) -> int:
    """Returns the mode of the root whose uppermost layer is a folder. Its owner may enter and
    write it in any case: this is user 0, who needs no permission, and the next init has none."""
    return stat.S_IMODE(os.stat(changes).st_mode) | 0o700


def _first_mode(record: RootRecord) -> int:
    """Returns the mode of a root before a session changes it, whatever the umask."""
    return _root_mode(record.layers[0]) if record.layers else 0o755


def size_mib(folder: str) -> int:
    """Returns the space that a folder takes on its disk, in MiB, rounded up. Blocks."""
    done = run_program([*scratch.as_owner(folder), "du", "-skx", folder])
    return -(-int(done.stdout.split()[0]) >> 10) if done.stdout else 0


def begin(origin: str, place: str, image: str) -> None:
    """Fills a fresh scratch directory with the files of another, or with frozen ones.

    Args:
        origin: the scratch directory of another session, or a folder of `freeze`.
        place: the fresh scratch directory.
        image: the folder of the new session's image, above which a frozen root is mounted. The
            folder may differ between nodes; the caller has checked that the image is the same.

    Raises:
        scratch.Uncopied: not everything could be copied.
        OSError: the scratch directory cannot be written.
    """
    scratch.copy(origin, place)
    record = root_record.recorded(origin)
    # only a session's own scratch directory has a `work` folder; its record names the image already
    if record is None or os.path.exists(scratch.work(origin)):
        return
    if record.way != "copy" and not os.path.exists(scratch.changes(origin)):
        os.mkdir(scratch.changes(place))
        os.chmod(scratch.changes(place), _first_mode(record))
    root_record.keep(place, msgspec.structs.replace(record, image=image))
