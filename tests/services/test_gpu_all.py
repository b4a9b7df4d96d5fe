"""`bench/gpu_all.py`, which runs all that needs a GPU, on slots of CPU: its benches, its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.backend_rig import NEEDS_TORCH

GPU_ALL = Path(__file__).resolve().parents[2] / "bench" / "gpu_all.py"


def gpu_all(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    told = subprocess.run([sys.executable, str(GPU_ALL), "--cpu", "--tiny", "--out", str(out),
                           *words], capture_output=True, text=True, check=False)
    assert "not installed: " in told.stdout, told.stderr[-2000:]
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return told.returncode, results


def test_a_check_for_which_no_time_is_left_is_named_and_fails_the_command(tmp_path: Path) -> None:
    status, told = gpu_all(tmp_path, "--only", "park", "--seconds", "1")
    assert status == 1 and told["devices"]["lent"] == "1 slot of CPU (cpu)"
    assert [(r["check"], r["status"]) for r in told["results"]] == [("park", "not begun")]


class TestBenches:
    pytestmark = [*NEEDS_TORCH, pytest.mark.timeout(900)]

    def test_the_gpu_benches_run_on_slots_of_cpu(self, tmp_path: Path) -> None:
        status, told = gpu_all(tmp_path, "--only", "park", "mopd", "--seconds", "1200")
        assert {r["check"]: r["status"] for r in told["results"]} == {"park": "ok", "mopd": "ok"}
        assert status == 0
        mopd = next(r["told"]["figures"] for r in told["results"] if r["check"] == "mopd")
        [load] = mopd["loads"]
        assert load["lost"] == 0 and load["largest_difference"] < 0.25
        # nothing is moved where all nine have room; on the other sides each swap copies weights
        assert load["oracle"]["mean_restore_ms"] < load["swapped"]["mean_restore_ms"]
