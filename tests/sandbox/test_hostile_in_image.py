"""The hostile code of the other backends in sessions that write their image, a Debian; as root, and
as a user without privileges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.debian_image import debian_root
from helpers.ordinary_user import NOBODY, TESTS, other_users_python, users_environment

# In these two the files of the machine are the image's own, or a session is asked for without one.
NOT_HERE = "not search_for_secrets_finds_them and not secrets_of_the_machine"
SUITE = tuple(str(TESTS / f"sandbox/test_{name}.py") for name in ("hostile", "hostile_secrets"))
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap")]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that an ordinary user may enter, with the root folder of a Debian."""
    folder = Path(tempfile.mkdtemp(prefix="tangram-hostile-"))
    folder.chmod(0o755)
    debian_root("bookworm", folder / "debian", ("python3", "procps"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("who", ["root", "nobody"])
def test_hostile_code_in_an_image_is_held(place: Path, who: str) -> None:
    python = sys.executable if who == "root" else other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    home = place / who
    home.mkdir()
    user = {}
    if who == "nobody":  # an overlay needs an image whose files belong to the worker's user
        subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", home, place / "debian"], check=True)
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120", "-m", "not long",
         "-k", NOT_HERE, f"--basetemp={home}/base", f"--rootdir={TESTS.parent}", *SUITE], cwd=home,
        env=users_environment(home) | {"TANGRAM_TEST_CONTAINER": f"bwrap:{place}/debian"},
        capture_output=True, text=True, timeout=800, check=False, **user)
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50, done.stdout[-2000:]
