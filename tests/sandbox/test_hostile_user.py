"""The hostile suite again as a user without any power: what holds for root must hold for him."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_executor_ends import other_users_python

NOBODY = 65534
HERE = Path(__file__).resolve().parent.parent
SUITE = tuple(f"sandbox/test_{name}.py" for name in ("hostile", "hostile_secrets", "file_modes"))


@pytest.mark.long  # in every run the cluster's user does it, in a job step
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_hostile_suite_as_nobody() -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    folder = Path(tempfile.mkdtemp(prefix="tangram-nobody-"))
    home = folder / "home"
    home.mkdir()
    for path in (folder, home):
        os.chown(path, NOBODY, NOBODY)
    packages = [p for p in sys.path if p.endswith("site-packages")]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8",
           "PYTHONPATH": ":".join([str(HERE.parent), str(HERE), *packages]),
           "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": (), "cwd": folder, "env": env}
    seen = subprocess.run([python, "-c", "import pytest, helpers.executor_rig"],
                          capture_output=True, check=False, **user)
    try:
        if seen.returncode:
            pytest.skip("no other user can read where this checkout lies")
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", "-m",
             "not long", f"--basetemp={folder}/base", f"--rootdir={HERE.parent}",
             *(str(HERE / name) for name in SUITE)],
            capture_output=True, text=True, timeout=560, check=False, **user)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)
