"""The hetjob template on a real Slurm: jobs of a non-root user, seen as users see them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_the_hetjob_template_runs_the_main_job(site: Site) -> None:
    """The RL step over coding tasks by the template; the mutations make each reward certain."""
    job = site.sbatch("main", "python -m tangram_hpc.demo.demo_rank --problems 12 --seed 0 "
                      "--scale 0.01 --out main.json")
    said = site.finish("main", job)
    told = json.loads((site.cluster.home / "main.json").read_text())
    assert len(told["ranks"]) == 2 and {r["via"] for r in told["ranks"]} == {"mpi"}, said
    assert sum(len(r["rewards"]) for r in told["ranks"]) == 48
    assert [r["wrong"] for r in told["ranks"]] == [[], []]
    assert told["mixed_groups"] > 0 and told["advantage_abs_mean"] > 0
    rows = site.acct(job)
    assert Counter(r["kind"] for r in rows)["exec"] == 96
    assert {r["component"] for r in rows} == {"cpu", "gpu"}
    site.until(lambda: site.components(job) == ["COMPLETED|0:0"] * 3, "sacct to say the end", 60,
               lambda: str(site.components(job)))
    told = site.tangram("info", "-j", job)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "has ended" in told.stderr


def test_two_thousand_actions_take_a_handful_of_job_steps(site: Site) -> None:
    job = site.sbatch("many", "python trainer_actions.py 2000", "trainer_actions.py", ranks=4)
    said = site.finish("many", job)
    assert f"job {job}: 2000 of 2000 ok on 4 ranks by mpi" in said, said
    rows = [r for r in site.acct(job) if r["name"] == "true"]
    assert len(rows) == 2000 and {r["state"] for r in rows} == {"COMPLETED"}
    nodes = Counter(r["node"] for r in rows)
    assert set(nodes) == {*site.cluster.cpu_nodes, *site.cluster.gpu_nodes}, nodes
    steps = site.sacct_steps(job)
    assert 4 <= len(steps) <= 8, steps
    assert all("COMPLETED" in step for step in steps), steps


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.long)])
def test_eight_ranks_get_all_64_kib_answers_over_mpi(site: Site, count: int) -> None:
    """Payloads are 64 KiB in each direction."""
    job = site.sbatch("echo", f"python trainer_echo.py {count}", "trainer_echo.py", ranks=8)
    said = site.finish("echo", job)
    assert f"echo: {count} right, 0 wrong, 8 ranks by mpi" in said, said
    assert len([r for r in site.acct(job) if r["name"] == "flip"]) == count


def test_scancel_during_a_training_step_leaves_nothing_behind(site: Site) -> None:
    with site.held("cancel") as job:
        assert len(site.pids("bin/tangram worker")) == 4
        child = subprocess.Popen(
            [str(site.venv / "bin/tangram"), "run", "-j", job, "--", "sh", "-c",
             "echo up; trap '' TERM; setsid sleep 4322 & sleep 4322"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
            **site.cluster.as_user())
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        site.cluster.run_as_user(["scancel", job])
        site.until(lambda: not site.state(job), "the job to go", 60)
        _, said = child.communicate(timeout=60)
        assert child.returncode != 0 and len(said.splitlines()) == 1, said
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))
    told = site.tangram("run", "-j", job, "--", "true")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "ended" in told.stderr


def test_a_signal_before_the_time_limit_ends_the_job_in_order(site: Site) -> None:
    """`--signal=B:TERM@120` sends the same. The ranks get SIGTERM, and their status is the
    job's."""
    job = site.sbatch("warned", "python trainer_warned.py", "trainer_warned.py")
    site.until(lambda: site.output("warned", job).count("up") == 2, "both ranks to be up", 90,
               lambda: site.output("warned", job))
    site.cluster.run_as_user(["scancel", "--batch", "--signal=TERM", job], check=True)
    said = site.finish("warned", job)
    assert said.count("saved") == 2, said
    site.until(lambda: site.components(job) == ["FAILED|5:0"] * 3, "sacct to say the end", 60,
               lambda: str(site.components(job)))
    assert not site.left_behind()


@pytest.mark.parametrize(("key", "value", "said"), [
    ("broker_options", "--placer fastest", "config field `placer`"), ("setup", "true", "`setup`"),
    ("trainer", "<TRAINER>", "<TRAINER>")])
def test_a_job_that_cannot_start_names_the_reason(
        site: Site, key: str, value: str, said: str) -> None:
    keys = {"trainer": "true", key: value}
    job = site.sbatch(f"bad_{key}", keys.pop("trainer"), strict=False, **keys)
    lines = [line for line in site.finish(f"bad_{key}", job).splitlines() if "tangram" in line]
    assert said in lines[0] and len(lines) == 1 + (key == "broker_options"), lines
    site.until(lambda: site.components(job)[:1] == ["FAILED|2:0"], "sacct to say the end", 60,
               lambda: str(site.components(job)))
    assert not site.left_behind()
