"""A session whose image is a whole Debian with several users and 30,000 files more, in a worker of
an ordinary user, with and without a range of numbers: apt, dpkg, useradd, su, pip, git, and a
server with its client. The test prints each command's exit status and the owners of its files. It
needs root to make the image, debootstrap and its mirror."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.debian_commands import PACKAGES, add_users, make_package
from helpers.debian_image import debian_image
from helpers.ordinary_user import other_users_python, users_environment
from test_image_users_subordinate import AS_NOBODY, NOBODY

HERE = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400), pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap")]

PROGRAM = """
import sys, time
from pathlib import Path
from helpers.debian_commands import commands
from helpers.executor_rig import Rig
from tangram_hpc.images.pull import PullSettings, pull
folder, image = Path(sys.argv[1]), sys.argv[2]
began = time.monotonic()
pulled = pull(image, PullSettings(str(folder / "store")), {})
print(f"| the pull of the image | {time.monotonic() - began:.1f} s | |")
rig = Rig(folder / "rig", trusted=False)
several = bool(rig.executor._supervisor.backends.bwrap.users)
assert several == (sys.argv[3] == "range"), rig.executor._supervisor.backends
began = time.monotonic()
rig.open(1, image=pulled.folder, disk_mib=2048, mem_mib=1024)
rig.shell("true", session=1)
print(f"| the start of the session | {time.monotonic() - began:.2f} s | |")
for path in sorted((folder / "files").iterdir()):
    assert rig.file(f"repo/{path.name}", path.read_bytes())[0].state == "COMPLETED"
failed = []
for title, user, paths, line in commands(several):
    outcome, back = rig.shell(line, session=1, timeout_ns=300 * 10**9, user=user)
    owners, told = rig.shell(f"stat -c '%n %U:%G' {paths}", session=1) if paths else (None, None)
    listed = ", ".join(told.stdout.decode().split("\\n")[:-1]) if told else ""
    print(f"| {title}{' as ' + user if user else ''} | {outcome.exit_code} | {listed} |")
    if outcome.exit_code or outcome.state != "COMPLETED":
        said = (back.stdout + back.stderr).decode(errors="replace") if back else ""
        failed.append((title, outcome.reason, said[-1500:]))
    assert outcome.isolation == f"bwrap+overlay{'+users' if several else ''}+seccomp"
rig.close()
left = [path for path in folder.joinpath("rig/scratch").rglob("changes")]
assert not left, left
for one in failed:
    print("failed:", *one, sep="\\n")
print("all is well" if not failed else "not well")
"""


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tangram-debian-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_a_debian_is_used_as_root_would(suite: str, place: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    image = debian_image(suite, place, PACKAGES, add_users)
    env = users_environment(place)
    place.chmod(0o755)
    for kind in ("none", *(["range"] if shutil.which("newuidmap") else [])):
        folder = place / kind
        folder.mkdir()
        for name in ("subuid", "subgid"):
            (folder / name).touch()
        make_package(folder)
        subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
        script = AS_NOBODY if kind == "range" else AS_NOBODY.replace("65534:300000", "other:300000")
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, str(folder), python, "-c", PROGRAM,
             str(folder), image, kind], cwd=folder, env=env, check=False, capture_output=True,
            text=True, timeout=1000)
        with capsys.disabled():
            ranged = "a range of numbers" if kind == "range" else "no range of numbers"
            print(f"\n{suite}, {ranged}\n| command | exit status | owners |\n|---|---|---|",
                  *(line for line in done.stdout.splitlines() if line.startswith("|")), sep="\n")
        assert done.returncode == 0 and "all is well" in done.stdout, (
            done.stdout[-6000:] + done.stderr[-3000:])
