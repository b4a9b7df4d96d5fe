"""Owns: folders with another release of Debian or Ubuntu in them, its Slurm and Python, made by
debootstrap and kept in `.vm`; and running a script there. Must not know what is run.

The script runs as root below that folder, in namespaces of its own for processes, mounts, network,
hostname and IPC: what it boots cannot meet the machine's, and ends with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".vm"
FREE_GB = 3
PACKAGES = (
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "munge", "mariadb-server",
    "slurm-wlm-basic-plugins", "libslurm-dev", "gcc", "libc6-dev", "make", "iproute2", "procps",
    "python3", "python3-venv", "python3-msgspec", "python3-numpy", "python3-pydantic",
    "python3-cloudpickle", "python3-cryptography", "python3-pytest", "python3-hypothesis",
    "python3-mpi4py",
)  # fmt: skip
UBUNTU = "http://archive.ubuntu.com/ubuntu"
UBUNTU_KEYS = "usr/share/keyrings/ubuntu-archive-keyring.gpg"


@dataclass(frozen=True)
class System:
    """A release of a distribution, for the Slurm that it has.

    Attributes:
        slurm: the release of Slurm, such as "24.11".
        suite: what the distribution calls its own release.
        ubuntu: whether it is Ubuntu's, else Debian's.
        pmix: whether its Slurm has a plugin for PMIx.
        pip: requirements that its own packages are too old for, or that it has no package of.
    """

    slurm: str
    suite: str
    ubuntu: bool = False
    pmix: bool = True
    pip: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        """The folder that the system is in."""
        return CACHE / self.suite


SYSTEMS = {system.slurm: system for system in (
    System("23.11", "noble", ubuntu=True, pip=("pydantic>=2.5", "msgspec", "cryptography>=42")),
    System("24.11", "trixie"),
    System("25.11", "resolute", ubuntu=True),
    System("26.05", "forky", pmix=False))}
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


def make(system: System) -> Path:
    """Returns its folder, made where it is not there yet (some minutes, 1 GB).

    Raises:
        Unavailable: the folder is not there and cannot be made.
    """
    if os.geteuid() != 0:
        raise Unavailable("only root can make and enter another system")
    if not shutil.which("unshare") or not shutil.which("ip"):
        raise Unavailable("needs unshare and ip (Debian: util-linux, iproute2)")
    if not system.root.exists():
        _bootstrap(system)
    _install(system)
    return system.root


def _bootstrap(system: System) -> None:
    if not shutil.which("debootstrap"):
        raise Unavailable("needs debootstrap (Debian: apt-get install debootstrap)")
    CACHE.mkdir(exist_ok=True)
    if shutil.disk_usage(CACHE).free < FREE_GB << 30:
        raise Unavailable(f"needs {FREE_GB} GB of disk at {CACHE}")
    part = CACHE / f"{system.suite}.part"
    shutil.rmtree(part, ignore_errors=True)
    options = ([f"--keyring={_ubuntu_keys()}", "--components=main,universe"] if system.ubuntu
               else [])
    # debootstrap is older than the release, whose script is as that of every release
    scripts = Path("/usr/share/debootstrap/scripts")
    script = [] if (scripts / system.suite).exists() else [
        str(scripts / ("gutsy" if system.ubuntu else "sid"))]
    # what it mounts there goes with its namespace
    _do(["unshare", "--mount", "debootstrap", "--variant=minbase", "--include=ca-certificates",
         *options, system.suite, str(part), UBUNTU if system.ubuntu else _mirror(), *script], 900)
    policy = part / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")  # no daemon starts because it was installed
    policy.chmod(0o755)
    part.rename(system.root)


def _inside(root: Path) -> list[str]:
    """The words before a command that runs in a system, with the network of this machine."""
    return ["unshare", "--pid", "--fork", "--mount", f"--mount-proc={root}/proc", "chroot",
            str(root)]


def _ubuntu_keys() -> Path:
    """The keys of Ubuntu's archive, from a package that Debian has signed."""
    debian = make(SYSTEMS["24.11"])
    if not (debian / UBUNTU_KEYS).exists():
        _do([*_inside(debian), "apt-get", "install", "-q", "-y", "ubuntu-keyring"], 300)
    return debian / UBUNTU_KEYS


def _install(system: System) -> None:
    """Installs all packages, where another list was installed."""
    root, made = system.root, system.root / "made"
    wanted = [p for p in PACKAGES if p.removeprefix("python3-") not in
              {re.split("[<>=]", line)[0] for line in system.pip}] + ["python3-pip"] * bool(
                  system.pip)
    if made.exists() and made.read_text().split() == [*wanted, *system.pip]:
        return
    inside = _inside(root)
    # a mirror may be a copy of some weeks ago, whose lists of an unstable suite count as expired
    _do([*inside, "apt-get", "update", "-q", "-o", "Acquire::Check-Valid-Until=false"], 300)
    _do([*inside, "apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted], 900)
    _do([*inside, "apt-get", "clean"], 60)
    if system.pip:
        _install_by_pip(system)
    made.write_text("\n".join([*wanted, *system.pip]))


def _install_by_pip(system: System) -> None:
    """Installs wheels that this machine's pip fetches for the other system's Python."""
    site = "usr/local/lib/python3/dist-packages"
    said = subprocess.run(["chroot", str(system.root), "python3", "-c",
                           "import sys; print(*sys.version_info[:2], sep='.')"],
                          capture_output=True, text=True, check=True).stdout.strip()
    _do([sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version",
         said, "--target", str(system.root / site.replace("python3/", f"python{said}/")),
         "--upgrade", *system.pip], 600)


def run(script: str, seconds: float, system: System) -> subprocess.CompletedProcess[str]:
    """Runs a bash script there, at a copy of this tree; what it prints is in `stdout`, errors too.

    Nothing of it runs on when this returns.

    Raises:
        Unavailable: the system is not there and cannot be made.
    """
    root = make(system)
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
