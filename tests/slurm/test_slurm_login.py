"""From the login side of a running job: `tangram run` behaves like srun, and bad input gives one
line."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job(site: Site) -> Iterator[str]:
    with site.held("login") as running:
        yield running


def test_run_streams_and_returns_the_exit_code(site: Site, job: str) -> None:
    began = time.monotonic()
    child = subprocess.Popen(
        [str(site.venv / "bin/tangram"), "run", "-j", job, "-c", "2", "--component", "gpu", "--",
         "sh", "-c", "echo first; sleep 2; pwd; echo $TANGRAM_CPUS >&2; exit 7"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
        **site.cluster.as_user())
    assert child.stdout is not None
    assert child.stdout.readline() == "first\n"
    assert child.poll() is None and time.monotonic() - began < 60
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (7, f"{site.cluster.home}\n", "2\n")
    rows = [r for r in site.acct(job) if r["name"] == "echo"]
    assert rows[-1]["component"] == "gpu" and rows[-1]["exit_code"] == 7


def test_run_pytest_as_in_the_readme(site: Site, job: str) -> None:
    suite = site.cluster.home / "suite"
    suite.mkdir()
    (suite / "test_it.py").write_text("def test_ok(): pass\ndef test_bad(): assert 1 == 2\n")
    told = site.cluster.run_as_user(
        f"cd suite && source {site.venv}/bin/activate && tangram run -j {job} -c 2 -- pytest -q")
    assert told.returncode == 1 and "1 failed, 1 passed" in told.stdout, told
    (suite / "test_it.py").write_text("def test_ok(): pass\n")
    told = site.cluster.run_as_user(
        f"cd suite && source {site.venv}/bin/activate && tangram run -j {job} -c 2 -- pytest -q")
    assert told.returncode == 0 and "1 passed" in told.stdout, told


def test_tangram_run_reports_signals_and_cancels_on_ctrl_c(site: Site, job: str) -> None:
    assert site.tangram("run", "-j", job, "--", "sh", "-c", "kill -9 $$").returncode == 137
    child = subprocess.Popen([str(site.venv / "bin/tangram"), "run", "-j", job, "--", "sleep",
                              "4321"], stderr=subprocess.PIPE, text=True, **site.cluster.as_user())
    site.until(lambda: site.pids("^sleep 4321"), "the action to run")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130 and not site.pids("^sleep 4321")


def test_bad_login_side_input_is_refused_in_one_line_with_status_2(site: Site, job: str) -> None:
    access = site.cluster.home / f".tangram/jobs/{job}/access.json"
    copy = site.cluster.home / "copy.json"
    for change, words in (("chmod 644 copy.json", "0644"),
                          ("sed -i 's/\"key\": \"[0-9a-f]\\{8\\}/\"key\": \"00000000/' copy.json",
                           "key is wrong"), ("rm copy.json", "No such file")):
        site.cluster.run_as_user(f"cp {access} copy.json; chmod 600 copy.json; {change}",
                                 check=True)
        told = site.tangram("run", "--", "true", TANGRAM_ACCESS=str(copy))
        assert (told.returncode, told.stderr.count("\n")) == (2, 1), told
        assert words in told.stderr
    for words, said in ((("run", "-j", job, "-c", "999", "--", "true"), "largest node has 8"),
                        (("run", "-j", "424242", "--", "true"), "424242"),
                        (("template", "check", "open.sbatch"), "<PARTITION_GPU>")):
        site.tangram("template", "render", "hetjob", "-o", "partition_cpu=cpu", "--output",
                     "open.sbatch")
        told = site.tangram(*words)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1), told
        assert said in told.stderr
    told = site.tangram("broker", TANGRAM_SYNC="perhaps")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "`sync`" in told.stderr
    assert site.tangram("run", "-j", job, "--", "true").returncode == 0  # it lives on


def test_a_template_with_placeholders_left_stops_at_once(site: Site) -> None:
    """Slurm's own fields are filled in, the trainer is not, and the script itself reports it."""
    told = site.tangram("template", "render", "hetjob", "--output", "left.sbatch",
                        "-o", "job_name=left", "-o", "partition_cpu=cpu", "-o",
                        "partition_gpu=gpu", "-o", "partition_trainer=trainer", "-o", "time=1")
    assert "<TRAINER>" in told.stderr
    told = site.cluster.run_as_user(["bash", "left.sbatch"])
    assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "<TRAINER>" in told.stderr


def srun(site: Site, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = "import tangram_hpc; tangram_hpc.connect()"
    return site.cluster.run_as_user(
        ["srun", "-p", "cpu", "--mem=100", "--overcommit", "--time=1", *words,
         str(site.venv / "bin/python"), "-c", code],
        env={"TANGRAM_GATEWAY": "1", **environ}, timeout=90)


def ours(told: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in told.stderr.splitlines() if "tangram" in line]


def test_a_wrong_mpi_launcher_or_world_size_is_refused_in_one_line(site: Site, job: str) -> None:
    told = srun(site, "-p", "scav", "-n3", "--mpi=none")
    lines = ours(told)
    assert told.returncode == 2 and len(lines) == 1, told.stderr
    assert "--mpi=none" in lines[0] and "--mpi=pmi2" in lines[0]
    told = srun(site, "-p", "scav", "-n3", "--mpi=pmi2", TANGRAM_WORLD_SIZE="5")
    lines = ours(told)
    assert told.returncode == 2 and len(lines) == 1, told.stderr
    assert "has 3 ranks, but 5 were launched" in lines[0]
