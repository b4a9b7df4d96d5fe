"""Every bench runs tiny here, so that none rots; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = sorted((Path(__file__).resolve().parent.parent / "bench").glob("bench_*.py"))


@pytest.mark.parametrize("path", BENCHES, ids=lambda p: p.stem)
def test_bench_runs_tiny_and_prints_one_json_line(path: Path, tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, str(path), "--tiny"], capture_output=True, text=True,
                          timeout=150, cwd=tmp_path, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    line = json.loads(told.stdout)
    assert {"bench", "parameters", "figures", "versions", "commit"} <= set(line)
    assert line["figures"]
