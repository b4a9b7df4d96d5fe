"""A session whose image is a whole Debian, in a worker of an ordinary user: apt, dpkg, useradd,
pip, git, and a server on the loopback. Needs root to make the image, debootstrap and its mirror."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_executor_ends import other_users_python

NOBODY = 65534
HERE = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap")]

PROGRAM = """
import sys
from pathlib import Path
from helpers.executor_rig import Rig
folder, image = Path(sys.argv[1]), sys.argv[2]
rig = Rig(folder / "rig", trusted=False)
rig.open(1, image=image, disk_mib=2048, mem_mib=1024)
for path in (folder / "files").iterdir():
    assert rig.file(f"repo/{path.name}", path.read_bytes())[0].state == "COMPLETED"
for line in sys.stdin.read().split("\\n\\n"):
    outcome, back = rig.shell(line, session=1, timeout_ns=300 * 10**9)
    said = (back.stdout + back.stderr).decode(errors="replace") if back else ""
    print("$", line, outcome.exit_code, outcome.reason, said[-3000:], sep="\\n")
    assert outcome.isolation == "bwrap+overlay+seccomp" and outcome.state == "COMPLETED"
rig.close()
print("all is well")
"""

# commands, each of which must succeed; an empty line is between two of them
COMMANDS = """
rm -rf /etc/apt/sources.list*; echo 'deb [trusted=yes] file:/session/repo ./' >/etc/apt/sources.list
apt-get -q update && apt-get -q install -y tangram-test && test "$(tt)" = works

grep -q ^ttuser: /etc/passwd && test -u /usr/bin/tt && dpkg -r tangram-test && ! test -e /usr/bin/tt

dpkg -i /session/repo/tangram-test_1.0_all.deb && dpkg --verify tangram-test

useradd -m bob && echo x >/home/bob/x && chown -R bob: /home/bob && su bob -c 'test -w ~/x'

PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --no-index --find-links /session/repo \\
 tiny_wheel

cd / && python3 -c 'import tiny_wheel; assert tiny_wheel.__file__.startswith("/usr/local")'

mkdir /testbed && cd /testbed && git init -q . && git config user.email a@b \\
 && git config user.name a \\
 && echo 1 >f && git add f && git commit -qm one && echo 2 >f && git diff --stat | grep -q f

cd /testbed && python3 -m http.server 80 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 3; \\
 python3 -c 'import urllib.request as r; assert r.urlopen("http://127.0.0.1/f").read() == b"2\\n"'
"""


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tangram-debian-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _package(folder: Path) -> None:
    """A repository with one package, whose script makes a user and a set-uid program, and a wheel.
    """
    tree, files = folder / "package", folder / "files"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/bin").mkdir(parents=True)
    files.mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: tangram-test\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@example.org>\n"
        "Description: test\n")
    (tree / "DEBIAN/postinst").write_text(
        "#!/bin/sh\nset -e\nuseradd --system --create-home --home-dir /var/lib/tt ttuser || true\n"
        "chown ttuser:ttuser /usr/bin/tt\nchmod 4755 /usr/bin/tt\n")
    (tree / "usr/bin/tt").write_text("#!/bin/sh\necho works\n")
    for path in (tree / "DEBIAN/postinst", tree / "usr/bin/tt", tree / "DEBIAN"):
        path.chmod(0o755)
    deb = files / "tangram-test_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(tree), str(deb)], check=True,
                   capture_output=True)
    fields = subprocess.run(["dpkg-deb", "-f", str(deb)], check=True, capture_output=True,
                            text=True).stdout
    digest = subprocess.run(["sha256sum", str(deb)], check=True, capture_output=True,
                            text=True).stdout.split()[0]
    (files / "Packages").write_text(f"{fields}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\n"
                                    f"SHA256: {digest}\n")
    with zipfile.ZipFile(files / "tiny_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_wheel.py", "x = 1\n")
        wheel.writestr("tiny_wheel-1.0.dist-info/METADATA",
                       "Metadata-Version: 2.1\nName: tiny_wheel\nVersion: 1.0\n")
        wheel.writestr("tiny_wheel-1.0.dist-info/WHEEL",
                       "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: "
                       "py3-none-any\n")
        wheel.writestr("tiny_wheel-1.0.dist-info/RECORD", "tiny_wheel.py,,\n")


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_a_debian_is_used_as_root_would(suite: str, place: Path) -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    image = place / "image"
    made = subprocess.run(["debootstrap", "--variant=minbase", "--include=git,python3-pip", suite,
                           str(image)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stdout.strip().splitlines()[-1:]}")
    _package(place)
    subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", str(place)], check=True)
    packages = [p for p in sys.path if p.endswith("site-packages")]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(place), "LANG": "C.UTF-8",
           "PYTHONPATH": ":".join([str(HERE.parent), str(HERE), *packages]),
           "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(place)}
    done = subprocess.run([python, "-c", PROGRAM, str(place), str(image)], input=COMMANDS.strip(),
                          user=NOBODY, group=NOBODY, extra_groups=(), cwd=place, env=env,
                          capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and "all is well" in done.stdout, (
        done.stdout[-6000:] + done.stderr[-3000:])
