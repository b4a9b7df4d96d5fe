"""Finds the folders that are installed beside the package: batch templates, and files for a site.

In a checkout such a folder lies beside the package. A wheel puts it below `share/tangram_hpc` of
the environment, or of the user with `pip install --user`; the record of the installation says
where.
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path

from ...errors import InvalidInput

_SHARED = ("share", "tangram_hpc")


def installed_folder(name: str, about: str) -> Path:
    """Returns a folder that was installed with the package.

    Args:
        name: the folder's name, such as "sbatch_templates".
        about: what it holds, for the message.

    Raises:
        InvalidInput: The folder is not installed.
    """
    above = Path(__file__).resolve().parents[3]
    if (above / "pyproject.toml").is_file() and (above / name).is_dir():
        return above / name  # a package of this name may lie beside an installed one
    try:
        files = metadata.files("tangram_hpc") or []
    except metadata.PackageNotFoundError:
        files = []
    shared = Path(sysconfig.get_path("data")).joinpath(*_SHARED, name)
    end = "/".join((*_SHARED, name)) + "/"
    recorded = (Path(str(file.locate()).partition(end)[0], end) for file in files
                if end in str(file))
    for place in (*recorded, shared):
        if place.is_dir():
            return place.resolve()
    raise InvalidInput(f"{about}: folder {shared} does not exist; install tangram-hpc again")
