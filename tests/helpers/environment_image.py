"""A small image in which agents work: several users, `useradd`, a server, and a `/testbed`."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from helpers.image_rig import MadeImage
from helpers.root_folder_rig import PROGRAMS, make_image

_PROGRAMS = (*PROGRAMS, "socat", "useradd")
_DEFS = "UID_MIN 1000\nUID_MAX 60000\nGID_MIN 1000\nGID_MAX 60000\nUSERGROUPS_ENAB yes\n"


def environment_image(place: Path) -> MadeImage:
    """Makes the image in a folder. `/var/lib/pg` and the closed folder in it belong to the user
    `pg`, as the files of a database do."""
    root = make_image(place / "root", _PROGRAMS)
    for name, text in (("group", "root:x:0:\npg:x:105:\n"), ("login.defs", _DEFS), ("shadow", ""),
                       ("nsswitch.conf", "passwd: files\ngroup: files\n")):
        (root / "etc" / name).write_text(text)
    (root / "home").mkdir()
    (root / "var/lib/pg/data").mkdir(mode=0o700)
    (root / "var/lib/pg/data/file").write_text("of pg\n")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(root, ".", filter=_owned)
    return MadeImage([out.getvalue()], inner={"WorkingDir": "/testbed"})


def _owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 105 if info.name.startswith("./var/lib/pg") else 0
    info.uname = info.gname = ""
    return info
