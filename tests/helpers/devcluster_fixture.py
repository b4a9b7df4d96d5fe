"""A real Slurm for tests: `running_cluster` boots one and takes it down. The law:

- it drives slurm/devcluster/devcluster from outside, as a person would;
- where this machine cannot boot one, the test is skipped with the reason, never passed;
- unless a test says otherwise, the cluster is an ordinary site (`ORDINARY`);
- it takes down only the cluster that it booted, whatever the test did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEVCLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "devcluster" / "devcluster"
COUNT = itertools.count()
# What most sites have and a lab does not: each node has an address, a host name, a /tmp and a
# /dev/shm of its own, its hosts file gives its own name a loopback address, as Debian's installer
# writes it, and a core is two CPUs. TEST_CLUSTER=lab leaves it out where networks cannot be nested.
ORDINARY = ({"netns": False} if os.environ.get("TEST_CLUSTER") == "lab" else
            {"netns": True, "debian_hosts": True, "threads_per_core": 2})


def reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "a Slurm cluster can only be booted by root"
    if not shutil.which("apt-get") and not shutil.which("slurmctld"):
        return "no apt-get and no slurmctld: this is not a Debian machine"
    return None


def devcluster(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the executable; the caller looks at returncode, stdout and stderr."""
    return subprocess.run(
        [sys.executable, str(DEVCLUSTER), *args],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@dataclass
class RunningCluster:
    name: str
    prefix: Path
    conf: Path
    user: str
    home: Path
    cpu_nodes: list[str]
    gpu_nodes: list[str]
    trainer_nodes: list[str]
    boot_seconds: float
    users: dict[str, str]  # name to home; the first is `user`
    more_env: dict[str, str] = dataclasses.field(default_factory=dict)  # of the users' commands

    def of(self, user: str) -> RunningCluster:
        """The same cluster as another of its users sees it."""
        return dataclasses.replace(self, user=user, home=Path(self.users[user]))

    @property
    def env(self) -> dict[str, str]:
        """The clean environment of the cluster's user."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.home), "USER": self.user, "LOGNAME": self.user,
            "LANG": "C.UTF-8", "SLURM_CONF": str(self.conf),
        } | self.more_env  # fmt: skip

    def as_user(self) -> dict:
        """Keyword arguments with which subprocess runs something as the user, in its home."""
        who = pwd.getpwnam(self.user)
        return {
            "user": who.pw_uid, "group": who.pw_gid, "cwd": self.home, "env": self.env,
            "extra_groups": os.getgrouplist(self.user, who.pw_gid), "umask": 0o022,
        }  # fmt: skip

    def run_as_user(
        self, cmd: list[str] | str, *, timeout: float = 60, check: bool = False, **kw
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (a string is a bash script); `env` in `kw` adds to the clean one."""
        argv = ["bash", "-c", cmd] if isinstance(cmd, str) else [str(word) for word in cmd]
        env = self.env | kw.pop("env", {})
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        if "input" in kw:
            del options["stdin"]
        options |= self.as_user() | kw | {"env": env}
        return subprocess.run(argv, timeout=timeout, check=check, **options)

    def status(self) -> dict:
        return json.loads(devcluster("status", "--prefix", str(self.prefix)).stdout)

    def pid_of(self, daemon: str) -> int:
        """The pid of `slurmctld`, `slurmdbd`, `slurmd-NODE`, ... as `up` started it."""
        return self.status()["daemons"][daemon]["pid"]


def option(key: str, value: object) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    values = value if isinstance(value, list) else [value]
    return [f"{flag}={v}" for v in values]


def as_a_site(options: dict[str, object]) -> dict[str, object]:
    """Returns the options of `up` with those of an ordinary site where none is given.

    Slurm binds to the machine's real CPUs with `cgroups`, which are too few for cores of two.
    Without a network of its own a node has no hosts file either.
    """
    chosen = ORDINARY | options
    if options.get("cgroups"):
        chosen["threads_per_core"] = options.get("threads_per_core", 1)
    if not chosen["netns"]:
        chosen["debian_hosts"] = options.get("debian_hosts", False)
    return chosen


@contextlib.contextmanager
def running_cluster(
    tmp_path_factory: pytest.TempPathFactory, **kw: object
) -> Iterator[RunningCluster]:
    """A cluster for the time of a `with`; `kw` are options of `up` (cpu_nodes=1, no_dbd=True),
    beside those of `ORDINARY`, and `more_env` for the users' commands.

    Afterwards its logs lie in a directory of `tmp_path_factory`.
    """
    if reason := reason_to_skip():
        pytest.skip(reason)
    more_env = dict(kw.pop("more_env", {}))
    name = str(kw.pop("name", f"t{os.getpid()}{chr(97 + next(COUNT) % 26)}"))
    prefix = str(kw.pop("prefix", f"/tmp/devcluster-{name}"))
    where = ["--name", name, "--prefix", prefix]
    words = [word for key, value in as_a_site(kw).items() for word in option(key, value)]
    done = devcluster("install", timeout=900)
    assert done.returncode == 0, done.stderr
    done = devcluster("up", *where, *words)
    assert done.returncode == 0, done.stderr
    up = json.loads(done.stdout)
    try:
        yield RunningCluster(
            name=up["name"], prefix=Path(up["prefix"]), conf=Path(up["conf"]), user=up["user"],
            home=Path(up["home"]), cpu_nodes=up["cpu_nodes"], gpu_nodes=up["gpu_nodes"],
            trainer_nodes=up["trainer_nodes"], boot_seconds=up["boot_seconds"],
            users=up["users"], more_env=more_env,
        )  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            logs = tmp_path_factory.mktemp(f"slurm-log-{name}")
            shutil.copytree(Path(prefix) / "log", logs, dirs_exist_ok=True)
        done = devcluster("down", *where)
        assert done.returncode == 0, done.stderr
