"""Every bench runs with tiny parameters here, so that none breaks unnoticed; no figure is judged,
so they run side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.forked_start import Script

BENCH = Path(__file__).resolve().parents[2] / "bench"
BENCHES = sorted([*BENCH.glob("bench_*.py"), BENCH / "peers" / "run.py"])
Told = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[dict[Path, Future[Told]]]:
    """The selected benches, three at a time: most of their time is starting and waiting."""
    def run(path: Path) -> Told:
        return subprocess.run([sys.executable, Script(path), "--tiny"], capture_output=True,
                              text=True, timeout=150, check=False,
                              cwd=tmp_path_factory.mktemp(path.stem))

    tmp_path_factory.getbasetemp()  # threads that make it at the same time get in each other's way
    here = [item.callspec.params["path"] for item in request.session.items
            if item.path == request.path]
    with ThreadPoolExecutor(3) as pool:
        yield {path: pool.submit(run, path) for path in here}


@pytest.mark.parametrize("path", BENCHES,
                         ids=lambda p: p.relative_to(BENCH).with_suffix("").as_posix())
def test_bench_runs_tiny_and_prints_one_json_line(path: Path, running: dict[Path, Future[Told]]
                                                  ) -> None:
    told = running[path].result()
    assert told.returncode == 0, (told.stdout + told.stderr)[-2000:]
    line = json.loads(told.stdout)
    assert {"bench", "parameters", "figures", "versions", "commit"} <= set(line)
    assert line["figures"]
    left_out = line["figures"].get("left_out")
    assert not isinstance(left_out, dict) or not left_out.get("failed"), "a peer failed"
