"""Sandboxes of apptainer, in a Debian that has it: what is inside, and that hostile code is held.

The Debian is made by debootstrap. The tests of `CONTAINER_TESTS` run in it as an ordinary user, who
may make user namespaces there, with the same Debian as the image of their sandboxes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.debian_image import debian_root
from helpers.other_system import ENV, ISOLATED

REPO = Path(__file__).resolve().parents[2]
SUITE = "sid"  # Debian 12 and 13 have no apptainer
PACKAGES = [
    "apptainer", "squashfuse", "procps", "python3-cloudpickle", "python3-cryptography",
    "python3-hypothesis", "python3-msgspec", "python3-numpy", "python3-pydantic", "python3-pytest",
    "python3-pytest-timeout", "python3-sqlalchemy",
]  # fmt: skip
# Devices of its own, as /dev/fuse of this machine may be closed to users; and a root by pivot_root,
# as no user namespace can be made after chroot.
BEGIN = """
set -e
mount --bind {root} {root}
cd {root}
mkdir -p old opt/image opt/tangram opt/out
mount -t tmpfs tmpfs dev
for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229; do
    IFS=: read name major minor <<< $device
    mknod -m 666 dev/$name c $major $minor
done
mkdir dev/pts dev/shm
ln -s /proc/self/fd dev/fd
for n in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${{n%:*}} dev/${{n#*:}}; done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t proc proc proc
mount --rbind /sys sys
mount --bind {root} opt/image
mount -o remount,bind,ro opt/image
mount --bind {repo} opt/tangram
mount -t tmpfs -o mode=1777 tmpfs tmp
ip link set lo up
pivot_root . old
umount -l /old
cd /tmp
exec setpriv --reuid 1000 --regid 1000 --clear-groups \
    env HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/tangram:/opt/tangram/tests bash -c "$1"
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400), pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap")]

Inside = Callable[[str], str]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Inside:
    """Runs a script in that Debian as an ordinary user, and returns all that it prints."""
    root = debian_root(SUITE, tmp_path_factory.mktemp("debian") / "root", ["python3"])
    # by apt, as debootstrap does not install all of these in an order that works
    apt = ["unshare", "--pid", "--fork", "--mount", f"--mount-proc={root}/proc", "chroot",
           str(root), "apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES]
    proxies = {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy")}
    done = subprocess.run(apt, env=ENV | proxies, capture_output=True, text=True, timeout=900,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with (root / "etc/passwd").open("a") as users:
        users.write("user:x:1000:1000::/tmp:/bin/sh\n")

    def run(script: str) -> str:
        done = subprocess.run(
            [*ISOLATED, "bash", "-c", BEGIN.format(root=root, repo=REPO), "-", script], env=ENV,
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=2000, check=False)
        print(done.stdout, file=sys.stderr)
        return done.stdout

    return run


# A user cannot pack the Debian, as some of its files are root's alone.
SMALL = """
mkdir -p /tmp/small/usr/bin /tmp/small/lib64 /tmp/small/etc /tmp/small/dev /tmp/small/proc \\
    /tmp/small/sys /tmp/small/tmp /tmp/small/var/tmp /tmp/small/session
ln -s usr/bin /tmp/small/bin
cp /etc/passwd /etc/group /etc/hosts /tmp/small/etc/
for name in cat df hostname id ls sh tail touch tr; do
    cp /usr/bin/$name /tmp/small/usr/bin/
    for library in $(ldd /usr/bin/$name | grep -o '/[^ ]*'); do
        mkdir -p /tmp/small/$(dirname $library)
        cp -L $library /tmp/small/$library
    done
done
apptainer --silent build /tmp/image.sif /tmp/small
"""
SEEN = """
import sys
from tangram_hpc import InfeasibleRequest, LocalCluster
LOOK = '''
echo user $(id -u) on $(hostname) in $PWD
echo kept > f; cat f /session/f /opt/image/etc/debian_version 2>&1 | tr '\\n' ' '; echo
for place in / /dev /usr /var/tmp; do touch $place/x 2>/dev/null && echo wrote $place; done
for file in passwd group hosts hostname resolv.conf; do
    (echo x >> /etc/$file) 2>/dev/null && echo wrote $file
done
df --output=size -B 1M /dev/shm | tail -n 1
echo x > /tmp/mine && echo x > /dev/shm/mine && echo x > /dev/null && echo own
ls /dev | tr '\\n' ' '
'''
with LocalCluster(cpus=2) as cluster:
    print(cluster.ask("nodes")["nodes"][0]["backends"])
    for image in sys.argv[1:]:
        with cluster.session(image=image, backend="apptainer", mem="256M") as session:
            done = session.exec(LOOK).result(120).check()
            print(done.text, done.isolation)
    try:
        cluster.session(backend="apptainer").opened.result(60)
    except InfeasibleRequest as error:
        print(error)
"""


def test_a_session_has_an_image_as_its_root_and_little_else(inside: Inside) -> None:
    told = inside(f"{SMALL}python3 - /opt/image /tmp/image.sif <<'END'\n{SEEN}\nEND")
    assert told.count("user 1000 on sandbox in /session\nkept kept cat: ") == 2, told
    assert "wrote" not in told and len(re.findall(r"\n +64\nown\n", told)) == 2, told
    assert told.count("apptainer+seccomp") == 2, told
    assert "image: apptainer builds its sandboxes from an image; name one" in told


def test_hostile_code_is_held(inside: Inside) -> None:
    told = inside("TANGRAM_TEST_CONTAINER=apptainer:/opt/image python3 -m pytest -q "
                  "-p no:cacheprovider -c /opt/tangram/pyproject.toml --rootdir /opt/tangram "
                  "--timeout 300 -m 'not long' /opt/tangram/tests/sandbox/test_hostile.py")
    last = told.strip().splitlines()[-1]
    assert re.search(r"\b[4-9]\d passed", last) and "failed" not in last and "error" not in last
