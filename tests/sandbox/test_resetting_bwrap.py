"""bubblewrap from 0.11.1 on, which resets SIGCHLD. A program that does so before the real one
stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.other_bwrap import cluster_with
from helpers.root_folder_rig import make_image

from tangram_hpc import LocalCluster

RESETTING = """#!/bin/sh
exec env --default-signal=CHLD {bwrap} "$@"
"""
# each round leaves an orphan that ends, and one that runs on
ORPHANS = """
for round in 1 2 3; do (/bin/sh -c : & ); (exec /bin/sh -c 'while :; do :; done' & ); done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_with(RESETTING, tmp_path_factory.mktemp("resetting")) as (found, running):
        assert found.bwrap.resets_sigchld
        yield running


@pytest.mark.parametrize("image", ["none", "read-only", "writable"])
def test_orphans_are_reaped(cluster: LocalCluster, tmp_path: Path, image: str) -> None:
    root = "" if image == "none" else str(make_image(tmp_path / "image"))
    with cluster.session(image=root, writable=image == "writable", background="end") as session:
        for _ in range(2):
            assert session.exec(ORPHANS).result(30).exit_code == 0
        seen = session.exec("cd /proc; echo [0-9]*").result(30).text.split()
    assert len(seen) <= 3  # the pause process, and what looks
