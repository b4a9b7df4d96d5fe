"""What a user does in a whole Debian: an image with two more users and 30,000 files of theirs, and
the commands, each with the files whose owners are listed. What is installed comes from a local
repository and a local index, which the commands expect in `/session/repo`.
"""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

FILES = 15_000  # how many files each of the two users has
PACKAGES = ("git", "python3-pip")

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


def make_package(folder: Path) -> None:
    """Makes `files` in a folder: a repository with one package, whose script makes a user and a
    set-uid program, and a wheel."""
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


def add_users(root: Path) -> None:
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


def commands(several: bool) -> list[tuple[str, str, str, str]]:
    """Returns the title, the user, the files and the text of each command.

    Args:
        several: whether sessions have several users; some commands need them.
    """
    texts = COMMANDS.strip() + "\n\n" + (OF_SEVERAL.strip() if several else "")
    found = []
    for text in texts.strip().split("\n\n"):
        words, _, line = text.partition("\n")
        title, user, paths = (word.strip() for word in words.split("|"))
        found.append((title, user, paths, line))
    return found
