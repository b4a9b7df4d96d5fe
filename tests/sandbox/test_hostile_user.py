"""The hostile suite again as a user without any power: what holds for root must hold for him."""

from __future__ import annotations

import os

import pytest
from helpers.ordinary_user import TESTS, ordinary_user

SUITE = tuple(f"sandbox/test_{name}.py" for name in ("hostile", "hostile_secrets", "file_modes"))


@pytest.mark.long  # in every run the cluster's user does it, in a job step
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_hostile_suite_passes_as_an_ordinary_user() -> None:
    with ordinary_user() as user:
        done = user.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", "-m",
                        "not long", f"--basetemp={user.folder}/base", f"--rootdir={TESTS.parent}",
                        *(str(TESTS / name) for name in SUITE), timeout_s=560)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
