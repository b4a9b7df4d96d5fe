"""Tests that need cgroup v2 alone, on a Debian kernel under qemu: the enforcement suite, as root in
the machine's root cgroup and as a plain user in a delegated one; sessions of that user which write
their image; and Slurm with its plugin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.devcluster_fixture import devcluster, reason_to_skip
from vm import boot

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SUITE = "tests/resources/test_enforce.py"
IMAGES = "tests/sandbox/test_image_session.py"
OF_IMAGES = ("write_their_own_roots or disk_limit or memory_limit or fork_starts_with or "
             "outlives_its_init")
RAN = re.compile(r"^(\S+::\S+?)(?:\[(\S+)\])? (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
NOT_AS_USER = {"test_a_plain_user_gets_enforcement_that_needs_no_root"}


def in_vm(*words: str, user: bool) -> tuple[list[tuple[str, str, str]], str]:
    """Runs tests; returns (test, parameters, outcome) of each, and all that was printed."""
    argv = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "-p", "no:cacheprovider",
            "--color=no", "--basetemp=/run/home/pytest", *words]
    try:
        ended = boot.run(argv, user=user, seconds=1500)
    except boot.Unavailable as error:
        pytest.skip(str(error))
    print(ended.console)
    assert ended.status == 0
    assert "TANGRAM-VM LEFT" not in ended.console
    ran: list[tuple[str, str, str]] = RAN.findall(ended.console)
    assert ran
    return ran, ended.console


@pytest.mark.parametrize("user", [False, True], ids=["root", "delegated"])
def test_the_enforcement_suite_passes_on_cgroup_v2(user: bool) -> None:
    ran, _ = in_vm(SUITE, user=user)
    on_v2 = [(test, word) for test, parameters, word in ran if parameters.startswith("cgroup2")]
    assert len(on_v2) >= 18
    assert {word for _, word in on_v2} == {"PASSED"}
    assert all(word == "SKIPPED" for _, parameters, word in ran
               if parameters.startswith("cgroup1"))


def test_sessions_of_images_on_cgroup_v2() -> None:
    """Their roots are copies: all files are on a tmpfs, which has no user attributes before Linux
    6.6, and this kernel is 6.1."""
    ran, printed = in_vm("-rP", "--timeout=600", IMAGES, "-k", OF_IMAGES, user=True)
    assert len(ran) >= 6 and {word for _, _, word in ran} == {"PASSED"}
    assert "limited by cgroup2" in printed


def test_slurm_and_its_plugin_on_cgroup_v2(tmp_path: Path) -> None:
    """A user's job step has cgroups with the plugin and none without; Slurm ends processes that
    were moved."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    assert devcluster("install", timeout=900).returncode == 0
    subprocess.run(["make", "-C", str(boot.REPO / "slurm/spank"), f"OUT={tmp_path}"], check=True)
    script = boot.REPO / "tests/vm/spank.sh"
    try:
        ended = boot.run(["/bin/bash", str(script), str(tmp_path / "tangram.so")])
    except boot.Unavailable as error:
        pytest.skip(str(error))
    print(ended.console)
    assert ended.status == 0
    assert re.findall(r"^SAW (.*?)\r?$", ended.console, re.MULTILINE) == [
        "cgroup2 cores memory quota True", "affinity True", "bound True 2", "child", "ended",
        "again", "left 0 idle"]


def test_the_vm_reports_the_status_of_a_failing_command() -> None:
    try:
        boot.install()
    except boot.Unavailable as error:
        pytest.skip(str(error))
    false = shutil.which("false")
    assert false is not None
    assert boot.run([false]).status == 1
