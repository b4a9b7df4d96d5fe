"""`tangram doctor` on the login side of a real Slurm and inside a job: what it says is true, and it
submits nothing and leaves nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

HET = """\
#!/bin/bash
#SBATCH -p cpu -N2 --ntasks-per-node=1 --cpus-per-task=1 --mem=300 --time=5 -o doctor.out
#SBATCH hetjob
#SBATCH -p gpu -N1 --ntasks-per-node=1 --cpus-per-task=2 --gres=gpu:2 --mem=300
#SBATCH hetjob
#SBATCH -p trainer -N1 -n2 --mem=300
source {venv}/bin/activate
tangram doctor --json >batch.json; echo $? >batch.status
srun --het-group=1 -n1 --overlap --mpi=none tangram doctor --json --mpi=none >step.json
echo $? >step.status
tangram doctor >page.txt
touch done_inside
for i in $(seq 600); do [ -e go_on ] && break; sleep 0.1; done
squeue -h -s -j $SLURM_JOB_ID -o %i >steps.txt
"""


def config_of(site: Site) -> dict[str, str]:
    told = site.cluster.run_as_user(["scontrol", "show", "config"]).stdout
    return {k.strip(): v.strip() for k, _, v in (r.partition("=") for r in told.splitlines())}


def by_name(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in told["checks"]}


def test_doctor_on_the_login_side_reports_the_cluster_as_configured(site: Site) -> None:
    before = config_of(site)
    told = site.tangram("doctor", "--json", timeout=170)
    page = json.loads(told.stdout)
    found = by_name(page)
    assert (told.returncode, page["place"], page["why_not"]) == (0, "login", []), page["why_not"]
    assert found["release"]["found"].startswith(f"{before['SLURM_VERSION']} (controller)")
    assert before["ClusterName"] in found["controller"]["found"]
    assert "cpu 2/2 up" in found["partitions"]["found"]
    assert "gpu 2/2 up (2 with GPUs)" in found["partitions"]["found"]
    assert found["het jobs"]["state"] == found["clock"]["state"] == "ok"
    assert found["plugins"]["state"] == "warn" and "task/none" in found["plugins"]["found"]
    assert "--mpi=pmi2 fits MPICH" in found["ways to start"]["found"]
    assert "process" in found["sandboxes"]["found"] and found["cgroups"]["state"] == "warn"
    for name in ("hello", "nodes", "job"):
        assert found[name]["state"] == "skip"
    assert config_of(site)["NEXT_JOB_ID"] == before["NEXT_JOB_ID"]  # nothing was submitted
    assert site.left_behind() == []


def test_doctor_reports_an_unreachable_controller(site: Site) -> None:
    """The configuration of the same cluster, with another port."""
    text = site.cluster.conf.read_text()
    port = config_of(site)["SlurmctldPort"]
    conf = site.cluster.home / "wrong.conf"
    conf.write_text(text.replace(f"SlurmctldPort={port}", f"SlurmctldPort={int(port) + 190}")
                    .replace("MessageTimeout=20", "MessageTimeout=5"))
    for path, word in ((conf, "the controller does not answer"),
                       (site.cluster.home / "no.conf", "no.conf, which does not exist")):
        told = site.tangram("doctor", "--json", timeout=170, SLURM_CONF=str(path))
        page = json.loads(told.stdout)
        assert (told.returncode, page["runs"]) == (1, False)
        assert [line.split(":")[0] for line in page["why_not"]] == ["controller"]
        assert word in by_name(page)["controller"]["found"]
        assert by_name(page)["partitions"]["state"] == "skip"


def test_doctor_inside_a_het_job_checks_its_components(site: Site) -> None:
    home, cluster = site.cluster.home, site.cluster
    (home / "doctor.sh").write_text(HET.format(venv=site.venv))
    told = cluster.run_as_user(["sbatch", "--parsable", "doctor.sh"])
    assert told.returncode == 0, told.stderr
    job = told.stdout.strip().split(";")[0]
    site.until((home / "done_inside").exists, "its own pages", 200,
               lambda: (home / "doctor.out").read_text())
    outside = cluster.run_as_user([  # such a step hears of no component
        "srun", "--overlap", "-N1", "-n1", f"--jobid={job}", "--het-group=0", "--mpi=none",
        str(site.venv / "bin" / "tangram"), "doctor", "--json"])
    (home / "go_on").touch()
    page = json.loads(outside.stdout)
    assert (outside.returncode, page["place"], page["why_not"]) == (0, "job", []), page["why_not"]
    site.until(lambda: site.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"),
               "the job's end", 200, lambda: (home / "doctor.out").read_text())

    page = json.loads((home / "batch.json").read_text())
    found = by_name(page)
    assert (home / "batch.status").read_text() == "0\n", page["why_not"]
    assert (page["place"], page["runs"]) == ("job", True)
    # of the one CPU that was asked for Slurm makes a core
    assert found["job"]["found"].startswith(f"job {job} on {cluster.cpu_nodes[0]}: 2 CPUs")
    assert "3 components" in found["het jobs"]["found"]
    assert "srun --mpi=pmi2 on 2 nodes" in found["hello"]["found"]
    nodes = [*cluster.cpu_nodes, *cluster.trainer_nodes]
    assert found["nodes"]["state"] == "ok" and all(n in found["nodes"]["found"] for n in nodes)
    assert any(n in found["nodes"]["found"] for n in cluster.gpu_nodes)

    step = json.loads((home / "step.json").read_text())  # a wrong way to start MPI
    found = by_name(step)
    assert (home / "step.status").read_text() == "1\n"
    assert "two worlds of one rank" in found["hello"]["found"]
    assert [line.split(":")[0] for line in step["why_not"]] == ["hello"], found["nodes"]
    assert "Slurm gave 2" in found["NVML"]["found"] and "by Slurm's word" in found["lent"]["found"]

    assert "The main job would run here" in (home / "page.txt").read_text()
    left = (home / "steps.txt").read_text().split()
    assert [s for s in left if "." in s and not s.endswith((".batch", ".extern"))] == []
    assert site.left_behind() == []
