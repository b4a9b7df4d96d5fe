"""Fixtures that several files share: a real Slurm, and this package installed where its user is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from devcluster_fixture import RunningCluster, running_cluster
from slurm_site import Site, install_for


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=2, trainer_nodes=1,
                         cpus_per_node=16) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def site(slurm: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(slurm, install_for(slurm, tmp_path_factory.mktemp("tree")))
