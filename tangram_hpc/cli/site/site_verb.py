"""`tangram site files`: lists or copies what an administrator installs on a cluster.

The files are those of the folder `slurm/` of a checkout: the SPANK plugin's source, the epilog,
module files, and what builds packages. A wheel brings them along, so nobody needs a checkout. They
are copied and never installed: where they belong is the site's decision.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from ...errors import InvalidInput

# The dev cluster boots a Slurm for tests. A checkout has it beside the files for sites.
_PARTS = ("README.md", "epilog.d", "modulefiles", "packaging", "spank")


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("site", help="list or copy what an administrator installs: SPANK plugin, "
                                      "epilog, module files")
    p.set_defaults(go=lambda args: args.act(args))
    acts = p.add_subparsers(metavar="ACT", required=True)
    files = acts.add_parser("files", help="list the files, or copy them into a folder")
    files.add_argument("folder", nargs="?", metavar="FOLDER",
                       help="folder to copy them into; it is made if needed (default: print the "
                            "path of each file as it is installed)")
    files.set_defaults(act=_files)


def _files(args: argparse.Namespace) -> int:
    from ..helpers.installed_files import installed_folder

    source = installed_folder("slurm", "files for a site")
    found = [path for part in _PARTS for path in _below(source / part)]
    if args.folder is None:
        for path in found:
            print(path)
        return 0
    if not args.folder:  # a shell variable that is not set
        raise InvalidInput("FOLDER: the name of the folder is empty; name one, such as `.`, or "
                           "leave it out to list the files")
    folder = Path(args.folder)
    for path in found:
        _copy(path, folder / path.relative_to(source))
    print(folder / "README.md")
    return 0


def _below(part: Path) -> list[Path]:
    """Returns a file, or the files of a folder; what was built there is left out."""
    paths = sorted(part.rglob("*")) if part.is_dir() else [part]
    return [path for path in paths if path.is_file() and path.suffix not in (".so", ".o")]


def _copy(source: Path, target: Path) -> None:
    """Copies a file with its mode; a file that is there already is never replaced by another."""
    try:
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise InvalidInput(f"FOLDER: {target} exists and differs; name an empty folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    except OSError as error:
        raise InvalidInput(f"FOLDER: {target}: {error.strerror}") from None
