"""Makes a whole Debian with debootstrap, as a folder or as an image, for tests of what users do in
one."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from helpers.image_rig import MadeImage


def debian_root(suite: str, root: Path, packages: Sequence[str]) -> Path:
    """Returns the root folder, made by debootstrap; skips the test where it cannot be made."""
    made = subprocess.run(["debootstrap", "--variant=minbase", f"--include={','.join(packages)}",
                           suite, str(root)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stdout.strip().splitlines()[-1:]}")
    return root


def debian_image(suite: str, place: Path, packages: Sequence[str],
                 change: Callable[[Path], None] | None = None) -> str:
    """Returns the image's name; skips the test where debootstrap cannot make it.

    Args:
        suite: a release of Debian, such as "bookworm".
        place: the folder in which the image is made; needs root.
        packages: what is installed besides the smallest Debian.
        change: gets the root folder and changes it before it becomes an image.
    """
    root = debian_root(suite, place / "root", packages)
    if change is not None:
        change(root)
    with tarfile.open(place / "layer.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(root, ".", filter=lambda info: None if info.isdev() else info)
    layout = MadeImage([(place / "layer.tar").read_bytes()]).layout(place / "layout")
    (place / "layer.tar").unlink()
    shutil.rmtree(root)
    return f"oci:{layout}"
