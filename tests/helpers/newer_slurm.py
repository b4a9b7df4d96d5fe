"""Owns: a folder with a newer Debian in it, its Slurm and Python, made by debootstrap and kept in
`.vm`; and running a script there. Must not know what is run.

The script runs as root below that folder, in namespaces of its own for processes, mounts, network,
hostname and IPC: what it boots cannot meet the machine's, and ends with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".vm"
SUITE = "trixie"  # Slurm 24.11
FREE_GB = 3
PACKAGES = [
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "munge", "mariadb-server",
    "slurm-wlm-basic-plugins", "libslurm-dev", "gcc", "libc6-dev", "make", "iproute2", "procps",
    "python3", "python3-venv", "python3-msgspec", "python3-numpy", "python3-pydantic",
    "python3-cloudpickle", "python3-cryptography", "python3-pytest", "python3-hypothesis",
    "python3-mpi4py",
]  # fmt: skip
SEEN = ("tangram_hpc", "slurm", "tests", "sbatch_templates", "bench", "pyproject.toml", "setup.py",
        "README.md")
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
       "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
ISOLATED = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--net", "--uts", "--ipc"]
BEGIN = """
set -e
mount --bind {root} {root} # a root that is no mount cannot be unshared from
cd {root}
mount -t proc proc {root}/proc
mount --rbind /sys {root}/sys
mount -t tmpfs tmpfs {root}/dev/shm
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
mount -t tmpfs tmpfs {root}/run
hostname newer
ip link set lo up
# without an address of another interface, Slurm resolves nothing and a broker can tell none
ip link add outside type veth peer name inside
ip addr add 10.99.0.1/24 dev outside
ip link set outside up
ip link set inside up
exec chroot {root} bash -c 'cd /opt/tangram && . /opt/script'
"""


class Unavailable(Exception):
    """This machine cannot make or run one; says why."""


def _do(argv: list[str], seconds: float) -> None:
    done = subprocess.run(argv, env=ENV | _proxy(), stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
                          check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(argv[:4])} ...: {done.stdout.strip()[-300:]}")


def _proxy() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy")}


def _mirror() -> str:
    """Where this machine's own packages come from."""
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.is_file() and (found := re.search(
                r"^(?:URIs:|deb(?: \[.*\])?)\s+(https?://\S+/debian)/?(?:\s|$)", path.read_text(),
                re.MULTILINE)):
            return found[1]
    return "http://deb.debian.org/debian"


def make() -> Path:
    """The folder, made where it is not there yet (some minutes, 1 GB). Raises Unavailable."""
    root = CACHE / SUITE
    if os.geteuid() != 0:
        raise Unavailable("only root can make and enter another system")
    if not shutil.which("unshare") or not shutil.which("ip"):
        raise Unavailable("needs unshare and ip (Debian: util-linux, iproute2)")
    if root.exists():
        _install(root)
        return root
    if not shutil.which("debootstrap"):
        raise Unavailable("needs debootstrap (Debian: apt-get install debootstrap)")
    CACHE.mkdir(exist_ok=True)
    if shutil.disk_usage(CACHE).free < FREE_GB << 30:
        raise Unavailable(f"needs {FREE_GB} GB of disk at {CACHE}")
    part = CACHE / f"{SUITE}.part"
    shutil.rmtree(part, ignore_errors=True)
    # what it mounts there goes with its namespace
    _do(["unshare", "--mount", "debootstrap", "--variant=minbase", "--include=ca-certificates",
         SUITE, str(part), _mirror()], 900)
    policy = part / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")  # no daemon starts because it was installed
    policy.chmod(0o755)
    _install(part)
    part.rename(root)
    return root


def _install(root: Path) -> None:
    """All packages, where another list was installed."""
    made = root / "made"
    if made.exists() and made.read_text().split() == PACKAGES:
        return
    inside = ["unshare", "--pid", "--fork", "--mount", f"--mount-proc={root}/proc", "chroot",
              str(root), "apt-get"]
    _do([*inside, "update", "-q"], 300)
    _do([*inside, "install", "-q", "-y", "--no-install-recommends", *PACKAGES], 900)
    _do([*inside, "clean"], 60)
    made.write_text("\n".join(PACKAGES))


def run(script: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a bash script there, at a copy of this tree; what it prints is in `stdout`, errors too.
    Nothing of it runs on when this returns. Raises Unavailable."""
    root = make()
    tree = root / "opt" / "tangram"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    for name in SEEN:
        path = REPO / name
        if path.is_dir():
            shutil.copytree(path, tree / name, ignore=skip)
        else:
            shutil.copy(path, tree / name)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.0.1 newer\n")
    (root / "opt/script").write_text(script)
    return subprocess.run([*ISOLATED, "bash", "-c", BEGIN.format(root=root)], env=ENV, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=seconds, check=False)
