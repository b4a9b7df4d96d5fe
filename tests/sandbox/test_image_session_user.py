"""Sessions with an image as a user without any power, where these tests are root's."""

from __future__ import annotations

import os
import re

import pytest
from helpers.ordinary_user import TESTS, ordinary_user


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("file", "least"), [("test_image_session.py", 20),
                                             ("test_snapshot_roots.py", 9)])
def test_the_image_session_tests_pass_as_an_ordinary_user(file: str, least: int) -> None:
    with ordinary_user() as user:
        done = user.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60",
                        f"--basetemp={user.folder}/base", f"--rootdir={TESTS.parent}",
                        "-m", "not long", str(TESTS / "sandbox" / file),
                        timeout_s=280)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed and int(passed[1]) > least, done.stdout[-2000:]
