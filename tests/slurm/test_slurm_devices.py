"""Devices under a real Slurm with fake GPUs: their numbers, the messages, and what is lent."""

from __future__ import annotations

import pytest
from helpers.slurm_site import Site

from tangram_hpc.slurm.job_environment import slurm_place

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TWO_STEPS = """\
#!/bin/bash
#SBATCH -p gpu -n2 -c2 --gres=gpu:4 --time=5
srun -n1 -c2 --exact --gres=gpu:1 bash -c 'env >one.env; sleep 5' &
srun -n1 -c2 --exact --gres=gpu:2 bash -c 'env >two.env; sleep 5' &
wait
srun -n1 --exact --gres=none bash -c 'env >none.env'
env >batch.env
"""


def test_two_concurrent_job_steps_have_disjoint_gpu_numbers(site: Site) -> None:
    """Two steps at once have GPUs of their own, and no number is in both."""
    home = site.cluster.home
    (home / "steps.sh").write_text(TWO_STEPS)
    told = site.cluster.run_as_user(["sbatch", "--parsable", "-o", "steps.out", "steps.sh"])
    assert told.returncode == 0, told.stderr
    job = told.stdout.strip()
    site.until(lambda: not site.state(job) or site.state(job) == "COMPLETED", "the job's end", 90)

    def gpus(name: str) -> set[int]:
        rows = (home / f"{name}.env").read_text().splitlines()
        place = slurm_place(dict(row.partition("=")[::2] for row in rows if "=" in row))
        assert place is not None
        return set(place.gpus)

    assert gpus("batch") == {0, 1, 2, 3} and gpus("none") == set()
    one, two = gpus("one"), gpus("two")
    assert (len(one), len(two)) == (1, 2) and not one & two and one | two <= gpus("batch")


def test_fake_gpus_are_lent_on_nodes_where_slurm_granted_gpus(site: Site) -> None:
    setup = f"source {site.venv}/bin/activate; export TANGRAM_DEVICES=fake"
    with site.held("devices", setup=setup) as job:
        nodes = {n["name"]: n for n in site.info(job)["nodes"]}
        for name in site.cluster.gpu_nodes:
            assert (nodes[name]["gpus"], nodes[name]["devices"]) == (2, "2 fake GPUs (fake)")
        for name in site.cluster.cpu_nodes:
            assert nodes[name]["gpus"] == 0 and "it gave none" in nodes[name]["devices"]
        told = site.tangram("run", "-j", job, "-G", "2", "--", "sh", "-c",
                            "echo $SLURMD_NODENAME[$CUDA_VISIBLE_DEVICES]")
        assert (told.returncode, told.stdout) == (0, "[]\n"), told.stderr
        assert "2 fake GPUs (fake)" in site.tangram("info", "-j", job).stdout
    ran = [r for r in site.acct(job) if r["gpus"]]
    assert [(r["gpus"], r["component"], r["gpu_util_pct"]) for r in ran] == [([0, 1], "gpu", None)]
