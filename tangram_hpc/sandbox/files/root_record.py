"""The record of how the root of a scratch directory is made: from which image, in which way, and
on which layers of snapshots.

An overlay's changes are useless without the folders below them. So the next init, a fork, a move
and a snapshot read in this record which folders these are. The record lies beside the files of the
sandbox, where no code of the sandbox can reach it.
"""

from __future__ import annotations

import os

import msgspec

from . import scratch

LAYERS_MAX = 100  # more would not fit into one page of mount options


class RootRecord(msgspec.Struct, frozen=True):
    """How the root of a scratch directory is made.

    Attributes:
        way: how the root is written, one of `image_root.WAYS`.
        image: the image's folder.
        image_mib: where the root is a copy of the image, the size of the image in MiB; else 0.
        layers: folders between the image and the changes, the uppermost first.
    """

    way: str
    image: str
    image_mib: int = 0
    layers: tuple[str, ...] = ()


# Made when the module is imported, which is before the fork server forks the first init: msgspec
# takes a millisecond to examine a class, and each init would do that anew.
_read = msgspec.json.Decoder(RootRecord).decode


def recorded(home: str) -> RootRecord | None:
    """Returns the record of a scratch directory; None when its sandbox has no root of its own."""
    try:
        with open(scratch.root_record(home), "rb") as file:
            return _read(file.read())
    except FileNotFoundError:
        return None


def keep(home: str, record: RootRecord) -> None:
    """Writes the record of a scratch directory."""
    with open(scratch.root_record(home), "wb") as file:
        file.write(msgspec.json.encode(record))


def settled_in(home: str) -> None:
    """Corrects the paths of layers in the record after a scratch directory was unpacked here: the
    layers were unpacked into it.
    """
    record = recorded(home)
    if record is not None and record.layers:
        layers = tuple(os.path.join(home, os.path.basename(each)) for each in record.layers)
        keep(home, msgspec.structs.replace(record, layers=layers))
