"""Sessions with an image as a user without any power, where these tests are root's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_executor_ends import other_users_python

NOBODY = 65534
HERE = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_sessions_with_an_image_as_nobody() -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    folder = Path(tempfile.mkdtemp(prefix="tangram-nobody-"))
    os.chown(folder, NOBODY, NOBODY)
    packages = [p for p in sys.path if p.endswith("site-packages")]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8",
           "PYTHONPATH": ":".join([str(HERE.parent), str(HERE), *packages]),
           "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": (), "cwd": folder, "env": env}
    seen = subprocess.run([python, "-c", "import pytest, helpers.executor_rig"],
                          capture_output=True, check=False, **user)
    try:
        if seen.returncode:
            pytest.skip("no other user can read where this checkout lies")
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60",
             f"--basetemp={folder}/base", f"--rootdir={HERE.parent}",
             "-m", "not long", str(HERE / "sandbox/test_image_session.py")],
            capture_output=True, text=True, timeout=280, check=False, **user)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed and int(passed[1]) > 20, done.stdout[-2000:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
