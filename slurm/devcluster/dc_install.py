"""`install`: installs Debian's Slurm packages. Invariants of this module:

- it calls apt-get, without recommended packages, and never removes or configures one;
- no daemon may start because a package was installed: policy-rc.d denies it for the time of
  the installation and is put back as it was;
- if all is installed already, nothing is run, and `install` returns in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from dc_base import SAFE_PATH, ClusterError, hold, require_root, say

PACKAGES = [
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "munge", "mariadb-server",
    "slurm-wlm-basic-plugins", "iproute2", "passwd", "util-linux",
    "libslurm-dev", "gcc", "libc6-dev", "make",
]  # fmt: skip
# What the tests of images use; where they cannot be installed, these tests are skipped. Debian's
# registry would begin to listen when it is installed, so it is installed here, where none may.
OF_IMAGES = {"docker-registry": "docker-registry", "squashfs-tools": "mksquashfs",
             "umoci": "umoci"}
CORE = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "useradd"]
DBD = ["slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db"]
HEADERS = ["slurm/spank.h", "stdio.h"]
POLICY = Path("/usr/sbin/policy-rc.d")
DENY = "#!/bin/sh\n# devcluster install: start no daemon\nexit 101\n"


def missing(dbd: bool = True) -> list[str]:
    """The programs, plugins and system users that `up` needs and this machine lacks."""
    lack = [p for p in CORE + (DBD if dbd else []) if not shutil.which(p, path=SAFE_PATH)]
    if not any(Path("/usr/lib").glob("*/slurm-wlm/mpi_pmi2.so")):
        lack.append("mpi_pmi2.so")
    for user in ["slurm", "munge"] + (["mysql"] if dbd else []):
        try:
            pwd.getpwnam(user)
        except KeyError:
            lack.append(f"user {user}")
    return lack


def missing_to_build() -> list[str]:
    """Returns the build tools of the SPANK plugin that this machine lacks; `up` works without them.
    """
    tools = [p for p in ("gcc", "make") if not shutil.which(p, path=SAFE_PATH)]
    return tools + [h for h in HEADERS if not Path("/usr/include", h).is_file()]


@contextlib.contextmanager
def no_daemon_starts(policy: Path = POLICY) -> Iterator[None]:
    """Inside this context policy-rc.d forbids to start daemons; afterwards it is as before."""
    old = (policy.read_bytes(), policy.stat().st_mode & 0o7777) if policy.is_file() else None
    if old and os.access(policy, os.X_OK):
        asked = subprocess.run([policy, "slurmctld", "start"], capture_output=True, check=False)
        if asked.returncode == 101:
            yield
            return
    try:
        policy.write_text(DENY)
        policy.chmod(0o755)
        yield
    finally:
        if old is None:
            policy.unlink(missing_ok=True)
        else:
            policy.write_bytes(old[0])
            policy.chmod(old[1])


def apt(*args: str) -> subprocess.CompletedProcess:
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C.UTF-8")
    return subprocess.run(
        ["apt-get", "-o", "DPkg::Lock::Timeout=400", *args],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip


def lists_present() -> bool:
    return any(Path("/var/lib/apt/lists").glob("*_Packages*"))


def install_of_images() -> None:
    """Installs what the tests of images use; says so and goes on where that fails."""
    lack = [p for p, program in OF_IMAGES.items() if not shutil.which(program, path=SAFE_PATH)]
    if not lack or os.geteuid() != 0 or not shutil.which("apt-get", path=SAFE_PATH):
        return
    with hold("install", 900), no_daemon_starts():
        if apt("install", "-y", "--no-install-recommends", *lack).returncode:
            say(f"cannot install {', '.join(lack)}: some tests of images will be skipped")


def install() -> None:
    if not missing() + missing_to_build():
        say("all packages are installed")
        return
    require_root()
    if not shutil.which("apt-get", path=SAFE_PATH):
        raise ClusterError("no apt-get: devcluster needs a Debian or Ubuntu machine", 2)
    with hold("install", 900):
        if not missing() + missing_to_build():
            return
        say("installing " + " ".join(PACKAGES))
        run_install()
    if lack := missing() + missing_to_build():
        raise ClusterError(f"still missing after apt-get install: {', '.join(lack)}")


def run_install() -> None:
    """Installs with apt-get, after `apt-get update` if there are no lists or they are too old."""
    fresh = not lists_present()
    if fresh and (done := apt("update")).returncode:
        what = "apt-get update failed: check the machine's apt sources"
        raise ClusterError(what, tail=done.stdout[-1500:])
    wanted = ["install", "-y", "--no-install-recommends", *PACKAGES]
    with no_daemon_starts():
        done = apt(*wanted)
        if done.returncode and not fresh:
            say("apt-get install failed, once more after apt-get update")
            apt("update")
            done = apt(*wanted)
    if done.returncode:
        what = f"apt-get install failed (exit {done.returncode}): its last lines follow"
        raise ClusterError(what, tail=done.stdout[-1500:])
