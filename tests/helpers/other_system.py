"""Owns: folders with another release of Debian or Ubuntu in them, or one for other processors, made
by debootstrap and kept in `.vm`; and running a script there. Must not know what is run.

The script runs as root below that folder, in namespaces of its own for processes, mounts, network,
hostname and IPC: what it boots cannot meet the machine's, and ends with it. Programs for another
processor are run by QEMU's user mode emulation, which the kernel is told of for that time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
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
    """A release of a distribution.

    Attributes:
        suite: what the distribution calls its own release.
        ubuntu: whether it is Ubuntu's, else Debian's.
        pmix: whether its Slurm has a plugin for PMIx.
        pip: requirements that its own packages are too old for, or that it has no package of.
        packages: what is installed of its own packages.
        emulated: whether it is for aarch64 (Debian's arm64), and this machine is not.
    """

    suite: str
    ubuntu: bool = False
    pmix: bool = True
    pip: tuple[str, ...] = ()
    packages: tuple[str, ...] = PACKAGES
    emulated: bool = False

    @property
    def root(self) -> Path:
        """The folder that the system is in."""
        return CACHE / (f"{self.suite}-arm64" if self.emulated else self.suite)


SYSTEMS = {  # by the release of Slurm that they have
    "23.11": System("noble", ubuntu=True, pip=("pydantic>=2.5", "msgspec", "cryptography>=42")),
    "24.11": System("trixie"),
    "25.11": System("resolute", ubuntu=True),
    "26.05": System("forky", pmix=False),
}
ARM64 = System("bookworm", emulated=True, packages=(
    "gcc", "libc6-dev", "python3-dev", "iproute2", "procps", "bubblewrap"), pip=(
    "pydantic>=2.5", "msgspec>=0.18", "cryptography>=42", "shtab>=1.7", "numpy>=1.24",
    "cloudpickle>=3.0", "sqlalchemy>=2.0.20", "setuptools", "pytest", "pytest-timeout",
    "hypothesis"))  # fmt: skip
BINFMT = Path("/proc/sys/fs/binfmt_misc")
QEMU = "/usr/bin/qemu-aarch64-static"
# the first bytes of a program for aarch64, and which of their bits count
AARCH64 = (r"\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
           r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff")
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
mount -t sysfs sysfs {root}/sys  # of this network; a bind would show the host's interfaces
mount --rbind /sys/fs/cgroup {root}/sys/fs/cgroup
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
    part = system.root.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    if system.emulated:
        _unpack(system, part)
        part.rename(system.root)
        return
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


def _unpack(system: System, root: Path) -> None:
    """Unpacks all packages into `root` and configures none, which would take long under emulation
    and is not needed to run programs.
    """
    _do(["unshare", "--mount", "debootstrap", "--foreign", "--arch=arm64", "--variant=minbase",
         f"--include={','.join(system.packages)}", system.suite, str(root), _mirror()], 900)
    for package in sorted(root.glob("var/cache/apt/archives/*.deb")):
        _do(["bash", "-c", 'set -o pipefail; dpkg-deb --fsys-tarfile "$0" | '
             'tar -x --keep-directory-symlink -C "$1"', str(package), str(root)], 60)
        package.unlink()
    for name in ("passwd", "group"):
        shutil.copy(root / f"usr/share/base-passwd/{name}.master", root / "etc" / name)
    if (root / "proc").is_symlink():  # debootstrap does that inside of a container
        (root / "proc").unlink()
    (root / "proc").mkdir(exist_ok=True)
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        if not (root / "dev" / name).exists():
            os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
    (root / "dev/shm").mkdir(exist_ok=True)


@contextlib.contextmanager
def _emulation(system: System) -> Iterator[None]:
    """Lets the kernel run programs for the system's processor by QEMU.

    Raises:
        Unavailable: it cannot.
    """
    name = BINFMT / "tangram-test-aarch64"
    if not system.emulated or list(BINFMT.glob("qemu-aarch64")):
        yield
        return
    if not Path(QEMU).exists():
        raise Unavailable(f"needs {QEMU} (Debian: apt-get install qemu-user-static)")
    if not (BINFMT / "register").exists():
        _do(["mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT)], 30)
    if name.exists():  # of a run that was killed
        name.write_text("-1")
    # F: the interpreter is opened now, since it is not there below another root
    (BINFMT / "register").write_text(f":{name.name}:M::{AARCH64}:{QEMU}:F")
    try:
        yield
    finally:
        name.write_text("-1")


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
    wanted = [p for p in system.packages if p.removeprefix("python3-") not in
              {re.split("[<>=]", line)[0] for line in system.pip}] + ["python3-pip"] * bool(
                  system.pip)
    if made.exists() and made.read_text().split() == [*wanted, *system.pip]:
        return
    if not system.emulated:  # where it is, they were unpacked
        _install_by_apt(root, wanted)
    if system.pip:
        _install_by_pip(system)
    made.write_text("\n".join([*wanted, *system.pip]))


def _install_by_apt(root: Path, wanted: list[str]) -> None:
    """Installs packages of the distribution."""
    inside = _inside(root)
    # a mirror may be a copy of some weeks ago, whose lists of an unstable suite count as expired
    _do([*inside, "apt-get", "update", "-q", "-o", "Acquire::Check-Valid-Until=false"], 300)
    _do([*inside, "apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted], 900)
    _do([*inside, "apt-get", "clean"], 60)


def _install_by_pip(system: System) -> None:
    """Installs wheels that this machine's pip fetches for the other system's Python."""
    said = subprocess.run(["chroot", str(system.root), "python3", "-c",
                           "import sys; print(*sys.version_info[:2], sep='.')"],
                          capture_output=True, text=True, check=True).stdout.strip()
    site = system.root / f"usr/local/lib/python{said}/dist-packages"
    platforms = [f"--platform={name}_aarch64" for name in (
        "manylinux2014", "manylinux_2_17", "manylinux_2_28")] if system.emulated else []
    _do([sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", *platforms,
         "--python-version", said, "--target", str(site), "--upgrade", *system.pip], 600)


def run(script: str, seconds: float, system: System) -> subprocess.CompletedProcess[str]:
    """Runs a bash script there, at a copy of this tree; what it prints is in `stdout`, errors too.

    Nothing of it runs on when this returns.

    Raises:
        Unavailable: the system is not there and cannot be made.
    """
    with _emulation(system):
        root = make(system)
        _copy_tree(root / "opt" / "tangram")
        (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.0.1 newer\n")
        (root / "opt/script").write_text(script)
        return subprocess.run([*ISOLATED, "bash", "-c", BEGIN.format(root=root)], env=ENV,
                              text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=seconds, check=False)


def _copy_tree(tree: Path) -> None:
    """Copies what the scripts use of this tree."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    for name in SEEN:
        path = REPO / name
        if path.is_dir():
            shutil.copytree(path, tree / name, ignore=skip)
        else:
            shutil.copy(path, tree / name)
