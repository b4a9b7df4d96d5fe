"""Ports and filtered networks for a user without privileges, if root runs these tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.ordinary_user import ordinary_user

HERE = Path(__file__).resolve().parent.parent
SUITE = ("sandbox/test_filtered_network.py", "client/test_port_streams.py")


@pytest.mark.long  # two minutes; the short suite runs the same tests as root
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_networks_and_ports_as_nobody() -> None:
    with ordinary_user() as user:
        done = user.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120",
                        f"--basetemp={user.folder}/b", f"--rootdir={HERE.parent}",
                        *(str(HERE / name) for name in SUITE), timeout_s=560)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 60, done.stdout[-2000:]
