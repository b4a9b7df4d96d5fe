"""On a real Slurm a requeued job resumes its own journal. A job of a rebuilt controller that has
the same id does not resume the old one's, whether or not it was requeued itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]

# One start: a broker and a worker, and a name whose work would say which start did it. The broker
# is killed before the job ends, so that the folder stays as a crash leaves it.
JOB = """#!/bin/bash
#SBATCH --requeue --open-mode=append -n1 -c2 --mem=300 -p cpu -t 10
export PATH={venv}/bin:$PATH TANGRAM_HOME={home}
start=${SLURM_RESTART_COUNT:-0}
cd ~
if [ "$start" -ge {from} ]; then
    tangram broker --nodes 1 --bind none &
    broker=$!
    access={home}/jobs/$SLURM_JOB_ID/access.json
    until grep -q "\\"pid\\": $broker" "$access"; do kill -0 $broker || exit 1; sleep 0.1; done
    tangram worker --cpus 2 --devices none &
    python - <<END
import tangram_hpc
with tangram_hpc.connect() as client:
    done = client.submit("echo {tag} of start $start", trusted=True, once="step0/reward/0")
    print("RESULT at start $start:", done.result(60).text.strip(), flush=True)
END
    kill -9 $broker
fi
echo "OVER $start"
sleep 300
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home for tangram that outlives a cluster, as a shared file system does."""
    folder = Path(tempfile.mkdtemp(prefix="tangram-identity-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def submit(site: Site, home: Path, tag: str, begins: int) -> str:
    """A job whose starts before number `begins` never reach a broker."""
    subprocess.run(["chown", "-R", site.cluster.user, home], check=True)  # the user is a new one
    script = JOB
    for key, value in (("venv", site.venv), ("home", home), ("tag", tag), ("from", begins)):
        script = script.replace("{" + key + "}", str(value))
    told = site.cluster.run_as_user(["sbatch", "--parsable", "-o", f"{tag}.out"], input=script)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def said(site: Site, tag: str) -> str:
    path = site.cluster.home / f"{tag}.out"
    return path.read_text() if path.exists() else ""


def over(site: Site, tag: str, start: int) -> str:
    site.until(lambda: f"OVER {start}\n" in said(site, tag), f"start {start}", 120,
               lambda: said(site, tag))
    return said(site, tag)


def test_a_requeued_job_resumes_and_a_job_of_a_rebuilt_controller_does_not(
        home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two clusters of one name, one after the other, on one home; both call their job 1."""
    name = f"i{os.getpid()}"
    prefix = f"/tmp/devcluster-{name}"
    options = {"name": name, "prefix": prefix, "cpu_nodes": 1, "gpu_nodes": 1, "trainer_nodes": 0,
               "conf_line": ["SlurmdTimeout=300",
                             f"AuthInfo=socket={prefix}/munge/munge.sock,cred_expire=5"]}
    with running_cluster(tmp_path_factory, **options) as cluster:
        site = Site(cluster, install_for(cluster, ("{tree}",)))
        job = submit(site, home, "first", 0)
        assert "RESULT at start 0: first of start 0\n" in over(site, "first", 0)
        cluster.run_as_user(["scontrol", "requeue", job], check=True)
        assert "RESULT at start 1: first of start 0\n" in over(site, "first", 1)
        cluster.run_as_user(["scancel", job], check=True)
    with running_cluster(tmp_path_factory, **options) as cluster:
        site = Site(cluster, install_for(cluster, ("{tree}",)))
        assert submit(site, home, "second", 2) == job, "the rebuilt controller must count from 1"
        for start in (0, 1):
            over(site, "second", start)
            cluster.run_as_user(["scontrol", "requeue", job], check=True)
        told = over(site, "second", 2)
        assert "RESULT at start 2: second of start 2\n" in told, told
        assert told.count("is not this job's") == 1
        cluster.run_as_user(["scontrol", "requeue", job], check=True)
        told = over(site, "second", 3)
        assert "RESULT at start 3: second of start 2\n" in told, told
        assert told.count("is not this job's") == 1
        cluster.run_as_user(["scancel", job], check=True)
