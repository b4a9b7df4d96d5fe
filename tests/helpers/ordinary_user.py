"""Runs programs as an ordinary user, for tests that root usually runs.

A user without privileges meets other limits than root: file modes, the limit of processes, and a
kernel that refuses more. Where the tests are not root's, their own user is that user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
TESTS = Path(__file__).resolve().parent.parent


def other_users_python() -> str:
    """Returns this Python, or the system's Python of the same version, if user 65534 may run it."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        if os.path.exists(path):
            try:
                subprocess.run([path, "-c", ""], user=NOBODY, group=NOBODY, cwd="/", check=True)
                return path
            except (OSError, subprocess.CalledProcessError):
                pass
    return ""


def users_environment(folder: Path, home: Path | None = None) -> dict[str, str]:
    """Returns the environment of a user who imports the package and the tests, and whose temporary
    files lie in a folder, which is also the home directory unless one is named."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8",
            "HOME": str(home or folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": ":".join([str(TESTS.parent), str(TESTS), *packages])}


class OrdinaryUser:
    """A user without privileges, who can import the package and the tests.

    Attributes:
        python: the interpreter that this user may run.
        folder: a folder of the user's own, which is also the home of its temporary files.
    """

    def __init__(self, python: str, folder: Path, number: int = NOBODY) -> None:
        self.python, self.folder, self._number = python, folder, number
        self._home = folder / "home"
        self._home.mkdir()
        self.take_over()

    def take_over(self) -> None:
        """Makes the user the owner of everything in its folder."""
        if os.geteuid() == 0:
            who = f"{self._number}:{self._number}"
            subprocess.run(["chown", "-hR", who, str(self.folder)], check=True)

    def run(self, *words: str, text: str = "", timeout_s: float = 60
            ) -> subprocess.CompletedProcess[str]:
        """Runs the user's Python with these arguments, in the user's folder; returns its result.

        Args:
            text: what it reads from its standard input.
            timeout_s: after this time the program is killed and TimeoutExpired raised.
        """
        env = users_environment(self.folder, self._home)
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": self._number, "group": self._number, "extra_groups": ()}
        return subprocess.run([self.python, *words], cwd=self.folder, env=env, input=text,
                              capture_output=True, text=True, timeout=timeout_s, check=False,
                              **user)


@contextmanager
def ordinary_user(number: int = NOBODY) -> Iterator[OrdinaryUser]:
    """Yields an ordinary user, and removes its folder afterwards. Skips the test where no other
    user can run this Python or read this checkout.

    Args:
        number: the user id, if root runs the tests.
    """
    python = other_users_python() if os.geteuid() == 0 else sys.executable
    if not python:
        pytest.skip("no other user can run this Python")
    # not a folder of pytest, which only the user who runs pytest may enter
    folder = Path(tempfile.mkdtemp(prefix="tangram-user-"))
    try:
        user = OrdinaryUser(python, folder, number)
        if user.run("-c", "import pytest, helpers.executor_rig").returncode:
            pytest.skip("no other user can read where this checkout lies")
        yield user
    finally:  # tests may have closed folders even to their owner, and root may not be the owner
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)
