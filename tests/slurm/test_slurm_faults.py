"""Processes are killed by SIGKILL during a training step: what survives, for how long, and which
ranks finish."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def start(site: Site, name: str, ranks: int, steps: int, grace_s: int, **keys: str
          ) -> tuple[str, Path]:
    go = site.cluster.home / f"{name}.go"
    (site.cluster.home / "tangram.toml").write_text(f"grace_s = {grace_s}\n")
    job = site.sbatch(name, f"python trainer_faults.py {steps} {go.name}", "trainer_faults.py",
                      "trainer_actions.py", ranks=ranks, config="tangram.toml", **keys)
    site.until(lambda: len(list(site.cluster.home.glob(f"faults.{job}.*.pid"))) == ranks,
               "all ranks to be in mid-step", 90, lambda: site.output(name, job))
    (site.cluster.home / "tangram.toml").unlink()
    return job, go


def test_ranks_continue_over_the_socket_when_the_gateway_is_killed(site: Site) -> None:
    """No action is lost and none runs twice."""
    job, go = start(site, "gwdies", ranks=2, steps=150, grace_s=30)
    (gateway,) = site.pids("bin/tangram gateway")
    os.kill(gateway, signal.SIGKILL)
    wanted = [f"rank {r}: 150 lines once and in order, by socket" for r in range(2)]
    site.until(lambda: all(w in site.output("gwdies", job) for w in wanted),
               "both ranks to finish over the socket", 120, lambda: site.output("gwdies", job))
    go.touch()
    site.finish("gwdies", job)
    rows = [r for r in site.acct(job) if r["kind"] == "exec"]
    assert len(rows) == 300 and {(r["state"], r["attempt"]) for r in rows} == {("COMPLETED", 1)}


def test_the_other_ranks_finish_and_sessions_keep_their_grace_when_a_rank_dies(site: Site) -> None:
    """The broker and its sessions survive for the grace period; the other ranks and a second
    trainer finish."""
    job, go = start(site, "rankdies", ranks=3, steps=100, grace_s=20)
    victim = int((site.cluster.home / f"faults.{job}.1.pid").read_text())
    os.kill(victim, signal.SIGKILL)
    wanted = [f"rank {r}: 100 lines once and in order, by mpi" for r in (0, 2)]
    site.until(lambda: all(w in site.output("rankdies", job) for w in wanted),
               "the other ranks to finish", 120, lambda: site.output("rankdies", job))
    assert site.info(job)["sessions"] == 3  # the dead rank's sandbox is kept for its grace
    second = site.cluster.run_as_user(
        [str(site.venv / "bin/python"), "-c",
         "import tangram_hpc\n"
         "with tangram_hpc.connect() as c, c.session() as s:\n"
         "    s.write('x', 'second').result()\n"
         "    print(s.exec('cat x').result().text, sum(c.map(pow, range(100), [2] * 100)), c.via)"],
        env={"TANGRAM_JOB": job}, timeout=60)
    assert second.stdout == "second 328350 socket\n", second.stderr
    third = site.cluster.run_as_user(  # and a whole world of MPI, with a gateway of its own
        ["srun", f"--jobid={job}", "--het-group=2", "--ntasks=3", "--overlap", "--mpi=pmi2",
         "bash", "-c", f"source {site.venv}/bin/activate; [ $SLURM_PROCID -lt 2 ] || "
         "exec tangram gateway; exec python trainer_actions.py 100"],
        env={"TANGRAM_JOB": job, "TANGRAM_GATEWAY": "1", "TANGRAM_WORLD_SIZE": "3"}, timeout=90)
    assert f"job {job}: 100 of 100 ok on 2 ranks by mpi" in third.stdout, third.stderr
    assert third.returncode == 0, third.stderr
    # a sandbox counts until it is down, also those of the trainers that said goodbye
    site.until(lambda: site.info(job)["sessions"] == 2, "the grace of the dead rank to end", 90,
               lambda: str(site.info(job)))
    go.touch()
    site.finish("rankdies", job)
    assert not site.pids("tangram")


@pytest.mark.long
@pytest.mark.parametrize("gateway", ["on", "off"])
def test_each_rank_says_in_one_line_that_its_broker_is_gone(site: Site, gateway: str) -> None:
    """The broker and the process that would start it again are killed."""
    keys = {} if gateway == "on" else {"gateway": "off", "mpi": "none"}
    name = f"nobroker{gateway}"
    job, _ = start(site, name, ranks=2, steps=10_000, grace_s=3, **keys)
    for pid in site.pids("bin/tangram broker"):
        os.kill(pid, signal.SIGKILL)
    said = site.finish(name, job, 120)
    lines = sorted(line for line in said.splitlines() if "error: rank " in line)
    assert [line.partition(f": job {job}: ")[0] for line in lines] == [
        f"tangram: error: rank {n}" for n in range(2)], said
    assert "Traceback" not in said, said
    site.until(lambda: not site.pids("tangram"), "all to end", 60)
    for left in site.left_behind():  # the next worker there, or the site's epilog, removes it
        assert "/tmp/tangram-broker-job" in left, left
        shutil.rmtree(left)
