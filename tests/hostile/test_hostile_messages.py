"""A flood of hostile messages ends no broker, none of its workers and no HTTP server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "hostile_messages.py"
COUNT = 20_000


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.attack("rank", "broker")
@pytest.mark.attack("network", "broker", "sessions")
def test_a_flood_of_hostile_messages_ends_nothing(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(PROGRAM), "--count", str(COUNT)], cwd=tmp_path,
                         capture_output=True, text=True, timeout=1100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    figures = json.loads(ran.stdout)["figures"]
    assert figures["messages"] >= COUNT and all(figures["alive"].values())
    assert figures["token_let_in"] == figures["stranger_let_in"] == 0
