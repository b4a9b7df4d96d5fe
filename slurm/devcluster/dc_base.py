"""Code that all verbs share: errors, the cluster's record, locks. Invariants of this module:

- it owns the record (`PREFIX/devcluster.json`, written by root only) and its format;
- a prefix without a record is not a cluster's: no verb may change or remove it;
- an error is one line that names the remedy; only `dc_cli` turns it into an exit code;
- it starts and ends no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECORD = "devcluster.json"
SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAME = re.compile(r"^[a-z][a-z0-9]{0,14}$")
USER = re.compile(r"^[a-z_][a-z0-9_-]{0,30}$")
PREFIX = re.compile(r"^/[A-Za-z0-9._/+-]{1,70}$")


class ClusterError(Exception):
    """Something failed; `code` is the exit status (2: cannot work here or wrong usage)."""

    def __init__(self, message: str, code: int = 1, tail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.tail = tail


def say(line: str) -> None:
    print(f"devcluster: {line}", file=sys.stderr, flush=True)


def require_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("not root: run it as root (it starts daemons and adds a user)", 2)


def default_prefix(name: str) -> Path:
    return Path("/tmp") / f"devcluster-{name}"


def resolve_prefix(prefix: str | None, name: str | None) -> Path:
    """Returns the prefix to work on: --prefix, else the default prefix of --name (`dev`)."""
    if prefix is None:
        name = name or "dev"
        if not NAME.match(name):
            raise ClusterError(
                f"bad --name {name!r}: use up to 15 lower-case letters and digits", 2
            )
        return default_prefix(name)
    path = Path(os.path.normpath(Path(prefix).absolute()))
    if not PREFIX.match(str(path)) or len(path.parts) < 3:
        raise ClusterError(
            f"bad --prefix {prefix!r}: use a short path of plain characters below a directory "
            "(unix sockets cap it at 70)",
            2,
        )
    return path


@dataclass
class User:
    """A unix user who may submit; `created`: by this cluster's `up`, which `down` undoes."""

    name: str
    home: str
    created: bool = False
    uid: int = -1


@dataclass
class Cluster:
    """One cluster as recorded under its prefix."""

    name: str
    prefix: str
    base_port: int
    users: list[User]
    cpu_nodes: list[str]
    gpu_nodes: list[str]
    trainer_nodes: list[str]
    cpus_per_node: int
    gpus_per_node: int
    dbd: bool
    conf_lines: list[str] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    cgroups: bool = False
    netns: bool = False
    threads_per_core: int = 1
    debian_hosts: bool = False
    slurmd_env: list[str] = field(default_factory=list)
    ready: bool = False
    daemons: list[dict] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return Path(self.prefix)

    @property
    def conf(self) -> str:
        return f"{self.prefix}/etc/slurm.conf"

    @property
    def user(self) -> str:
        """The first user, who is the default where no user is named."""
        return self.users[0].name

    @property
    def home(self) -> str:
        return self.users[0].home

    @property
    def nodes(self) -> list[str]:
        return self.cpu_nodes + self.gpu_nodes + self.trainer_nodes

    def save(self) -> None:
        part = self.root / (RECORD + ".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.chmod(0o644)
        part.replace(self.root / RECORD)

    @classmethod
    def load(cls, prefix: Path) -> Cluster | None:
        """The record under `prefix`; None when there is none. A forged one is refused."""
        path = prefix / RECORD
        try:
            if path.stat().st_uid != 0 or prefix.stat().st_uid != 0:
                raise ClusterError(f"{path} is not root's: it was not written by devcluster")
            fields = json.loads(path.read_text())
            return cls(**{**fields, "users": [User(**u) for u in fields["users"]]})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError) as err:
            raise ClusterError(f"cannot read the record {path}: {err}") from err

    @classmethod
    def demand(cls, prefix: Path) -> Cluster:
        found = cls.load(prefix)
        if found is None:
            raise ClusterError(f"no cluster at {prefix}: start one with `devcluster up`", 2)
        return found


def try_hold(what: str) -> socket.socket | None:
    """A machine-wide lock without a file (an abstract socket); None when another has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0tangram-devcluster-{what}")
    except OSError:
        lock.close()
        return None
    return lock


@contextlib.contextmanager
def hold(what: str, timeout: float) -> Iterator[None]:
    end = time.monotonic() + timeout
    while (lock := try_hold(what)) is None:
        if time.monotonic() > end:
            raise ClusterError(f"another devcluster holds '{what}' for {timeout:.0f} s: wait")
        time.sleep(0.1)
    with contextlib.closing(lock):
        yield
