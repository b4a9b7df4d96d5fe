"""Ray trainers on a real Slurm whose nodes are network namespaces: by a template's launcher, and by
a script of the trainer's own with the lines that the documents add to it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import DATA, REPO, Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]

TOLD = "ray nodes 2, actors on 2, total 2470"  # the squares of 0 to 19


@pytest.fixture(scope="module")
def ray_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster of its own, and an environment with this package and Ray."""
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=0, trainer_nodes=2, netns=True,
                         users=1, no_dbd=True) as cluster:
        site = Site(cluster, install_for(cluster, ("{tree}", "ray>=2.49")))
        shutil.copy(DATA / "trainer_ray.py", cluster.home)
        yield site


def test_a_template_starts_ray_on_all_trainer_nodes(ray_site: Site) -> None:
    job = ray_site.sbatch("rays", "python trainer_ray.py 2", template="homogeneous", launcher="ray",
                          partition="trainer", nodes="2", ranks="2", cpus_lent="1",
                          cpus_per_rank="2", mem="1500")
    said = ray_site.finish("rays", job, 300)
    assert TOLD in said, said[:6000]
    assert len([row for row in ray_site.acct(job) if row["name"] == "pow"]) == 20
    # each node has a /tmp of its own; the epilog of the last task may still be at work
    ray_site.until(lambda: not any("/tmp/ray-" in line for line in ray_site.left_on_nodes()),
                   "Ray's files to be gone", 60, lambda: str(ray_site.left_on_nodes()[:5]))
    assert not ray_site.left_behind()


def test_a_trainers_own_script_needs_only_the_documented_lines(ray_site: Site) -> None:
    script = (DATA / "ray_on_slurm.sbatch").read_text()
    added = re.search(r"# >>> tangram\n(.*?)# <<< tangram", script, re.DOTALL)
    documented = (REPO / "docs" / "TEMPLATES.md").read_text()
    assert added is not None
    for line in ("tangram broker --nodes", "trap 'kill %1; wait %1' EXIT",
                 "sbatch satellite.sbatch"):
        assert line in added[1] and line in documented
    (ray_site.cluster.home / "own.sbatch").write_text(script)
    told = ray_site.cluster.run_as_user(
        ["sbatch", "--parsable", "--partition=trainer", f"--export=ALL,VENV={ray_site.venv}",
         "own.sbatch"])
    assert told.returncode == 0, told.stderr
    job = told.stdout.strip()
    said = ray_site.finish("own", job, 300)
    assert TOLD in said, said[:6000]
    assert len([row for row in ray_site.acct(job) if row["name"] == "pow"]) == 20
    ray_site.until(lambda: not ray_site.left_behind(), "the satellite to end", 60,
                   lambda: str(ray_site.left_behind()))
