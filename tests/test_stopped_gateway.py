"""A gateway that is stopped, for a while or for good, holds no MPI step up: the step ends with its
trainers, who go on over the broker's socket."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from slurm_site import Site


@pytest.mark.slurm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("again", [True, False], ids=["stopped for 8 s", "stopped for good"])
def test_under_srun_the_step_ends(site: Site, again: bool) -> None:
    """`srun --kill-on-bad-exit=0`, as the templates say it."""
    name = f"gwstop{int(again)}"
    go = site.cluster.home / f"{name}.go"
    job = site.sbatch(name, f"python trainer_faults.py 100 {go.name}", "trainer_faults.py",
                      "trainer_actions.py", ranks=2)
    site.until(lambda: len(list(site.cluster.home.glob(f"faults.{job}.*.pid"))) == 2,
               "both ranks to be in mid-step", 90, lambda: site.output(name, job))
    (gateway,) = site.pids("bin/tangram gateway")
    os.kill(gateway, signal.SIGSTOP)
    try:
        wanted = [f"rank {r}: 100 lines once and in order, by socket" for r in range(2)]
        if again:
            time.sleep(8)  # longer than a rank's patience with its gateway
            os.kill(gateway, signal.SIGCONT)
        site.until(lambda: all(w in site.output(name, job) for w in wanted),
                   "both ranks to finish over the socket", 90, lambda: site.output(name, job))
        go.touch()
        site.finish(name, job)
    finally:
        if Path(f"/proc/{gateway}").exists():
            os.kill(gateway, signal.SIGKILL)
    assert not site.pids("tangram")
