"""A cluster whose bubblewrap is a program of the test, which stands for another version."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.sandbox.manager.backends import Backends


@contextmanager
def cluster_with(script: str, place: Path) -> Iterator[tuple[Backends, LocalCluster]]:
    """Yields what the probe found, and a cluster of two cores whose sessions have `bwrap`.

    Args:
        script: the text of the program; `{bwrap}` is the path of the real one.
        place: a folder for the program and the cluster.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bwrap is not installed")
    program = place / "bwrap"
    program.write_text(script.format(bwrap=bwrap))
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        found = Backends.probed()
        if "bwrap" not in found.trusted:
            pytest.skip(found.why_not["bwrap"])
        with LocalCluster(cpus=2, home=place / "home", isolation="bwrap") as running:
            yield found, running
