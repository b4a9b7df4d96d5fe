"""A session whose image is a whole Debian with several users and 30,000 files more, in a worker of
an ordinary user, with and without a range of numbers: apt, dpkg, useradd, su, pip, git, and a
server with its client. The test prints each command's exit status and the owners of its files. It
needs root to make the image, debootstrap and its mirror."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.debian_image import debian_image
from helpers.ordinary_user import other_users_python, users_environment
from test_image_users_subordinate import AS_NOBODY, NOBODY

HERE = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400), pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap")]
FILES = 15_000  # how many files each of the two users has

PROGRAM = """
import sys, time
from pathlib import Path
from helpers.executor_rig import Rig
from tangram_hpc.images.pull import PullSettings, pull
folder, image = Path(sys.argv[1]), sys.argv[2]
began = time.monotonic()
pulled = pull(image, PullSettings(str(folder / "store")), {})
print(f"| the pull of the image | {time.monotonic() - began:.1f} s | |")
rig = Rig(folder / "rig", trusted=False)
several = bool(rig.executor._supervisor.backends.users)
assert several == (sys.argv[3] == "range"), rig.executor._supervisor.backends
began = time.monotonic()
rig.open(1, image=pulled.folder, disk_mib=2048, mem_mib=1024)
rig.shell("true", session=1)
print(f"| the start of the session | {time.monotonic() - began:.2f} s | |")
for path in sorted((folder / "files").iterdir()):
    assert rig.file(f"repo/{path.name}", path.read_bytes())[0].state == "COMPLETED"
failed = []
for text in sys.stdin.read().strip().split("\\n\\n"):
    words, _, line = text.partition("\\n")
    title, user, paths = (word.strip() for word in words.split("|"))
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

# title | user | files whose owners are listed, and the command; an empty line is between two
COMMANDS = """
write /testbed | | /testbed /testbed/f
mkdir /testbed && echo 1 >/testbed/f && test "$(cat /testbed/f)" = 1

the 30,000 files of two users | | /home/ann /home/ann/0/0.py /home/ben/7/99.py
test "$(find /home/ann /home/ben -type f | wc -l)" = 30000

apt-get install from a local repository | | /usr/bin/tt /var/lib/tt
rm -rf /etc/apt/sources.list*; echo 'deb [trusted=yes] file:/session/repo ./' >/etc/apt/sources.list
apt-get -q update && apt-get -q install -y tangram-test && test "$(tt)" = works

a package's user and its set-uid bit, dpkg -r | |
grep -q ^ttuser: /etc/passwd && test -u /usr/bin/tt && dpkg -r tangram-test && ! test -e /usr/bin/tt

dpkg -i and --verify | | /usr/bin/tt
dpkg -i /session/repo/tangram-test_1.0_all.deb && dpkg --verify tangram-test

useradd, chown -R, su | | /home/bob /home/bob/x
useradd -m bob && echo x >/home/bob/x && chown -R bob: /home/bob && su bob -c 'test -w ~/x'

a command of another user | bob | /home/bob /home/bob/mine
test "$(whoami)$HOME" = "$USER/home/bob" -o "$(id -u)" = 0 && echo y >~/mine && test -w ~/x

a user of the image writes its files | ann | /home/ann/0/0.py /home/ann/new
echo 'x = 2' >>~/0/0.py && touch ~/new

pip install from a local index | | /usr/local/lib/python3*/dist-packages/tiny_wheel.py
cd /session/repo && mkdir -p simple/tiny-wheel && cp tiny_wheel*.whl simple/tiny-wheel/ &&
echo '<a href="tiny_wheel-1.0-py3-none-any.whl">tiny_wheel-1.0-py3-none-any.whl</a>' \\
 >simple/tiny-wheel/index.html; python3 -m http.server 8001 --bind 127.0.0.1 >/dev/null 2>&1 &
sleep 4; PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --index-url \\
 http://127.0.0.1:8001/simple tiny_wheel; got=$?; kill %1; exit $got

what pip has installed | |
cd / && python3 -c 'import tiny_wheel; assert tiny_wheel.__file__.startswith("/usr/local")'

git | | /testbed/.git/HEAD
cd /testbed && git init -q . && git config user.email a@b && git config user.name a \\
 && git add f && git commit -qm one && echo 2 >f && git diff --stat | grep -q f

a server on port 80 and its client | |
cd /testbed && python3 -m http.server 80 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 4; \\
 python3 -c 'import urllib.request as r; assert r.urlopen("http://127.0.0.1/f").read() == b"2\\n"'
"""

# what only real users can do
OF_SEVERAL = """
a server that leaves root for its own user | | /run/served
python3 - <<'END'
import os, pwd, socket
one = pwd.getpwnam("ttuser")
server = socket.create_server(("127.0.0.1", 81))
if os.fork() == 0:
    os.setgroups([]); os.setgid(one.pw_gid); os.setuid(one.pw_uid)
    try:
        os.setuid(0)
        said = b"root again"
    except PermissionError:
        said = f"{os.getuid()} {os.access('/etc/shadow', os.R_OK)}".encode()
    server.accept()[0].sendall(said)
    os._exit(0)
said = socket.create_connection(("127.0.0.1", 81)).recv(99).decode()
assert said == f"{one.pw_uid} False", said
open("/run/served", "w"); os.chown("/run/served", one.pw_uid, one.pw_gid)
END

what is root's is closed to others | bob |
! cat /etc/shadow 2>/dev/null && ! touch /testbed/new 2>/dev/null && ! ls /home/ben 2>/dev/null

su from a user leads nowhere | bob |
! su -c true root </dev/null 2>/dev/null && ! su -c true ann </dev/null 2>/dev/null
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


def _users(root: Path) -> None:
    """Two users with files of their own."""
    for number, name in ((1000, "ann"), (1001, "ben")):
        with open(root / "etc/passwd", "a") as passwd, open(root / "etc/group", "a") as group:
            passwd.write(f"{name}:x:{number}:{number}::/home/{name}:/bin/sh\n")
            group.write(f"{name}:x:{number}:\n")
        for folder in range(FILES // 100):
            here = root / f"home/{name}/{folder}"
            here.mkdir(parents=True)
            for file in range(100):
                (here / f"{file}.py").write_text(f"x = {file}\n")
        (root / f"home/{name}").chmod(0o700)
        subprocess.run(["chown", "-R", f"{number}:{number}", root / f"home/{name}"], check=True)


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_a_debian_is_used_as_root_would(suite: str, place: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    image = debian_image(suite, place, ("git", "python3-pip"), _users)
    env = users_environment(place)
    place.chmod(0o755)
    for kind in ("none", *(["range"] if shutil.which("newuidmap") else [])):
        folder = place / kind
        folder.mkdir()
        for name in ("subuid", "subgid"):
            (folder / name).touch()
        _package(folder)
        subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
        script = AS_NOBODY if kind == "range" else AS_NOBODY.replace("65534:300000", "other:300000")
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, str(folder), python, "-c", PROGRAM,
             str(folder), image, kind], cwd=folder, env=env, check=False, capture_output=True,
            input=COMMANDS.strip() + ("\n\n" + OF_SEVERAL.strip() if kind == "range" else ""),
            text=True, timeout=1000)
        with capsys.disabled():
            ranged = "a range of numbers" if kind == "range" else "no range of numbers"
            print(f"\n{suite}, {ranged}\n| command | exit status | owners |\n|---|---|---|",
                  *(line for line in done.stdout.splitlines() if line.startswith("|")), sep="\n")
        assert done.returncode == 0 and "all is well" in done.stdout, (
            done.stdout[-6000:] + done.stderr[-3000:])
