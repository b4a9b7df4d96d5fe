"""What tests do on the dev cluster: install as a user would, render, submit, wait, look.

Law: everything runs as the cluster's non-root user, from the "login side", through the commands
that a user has; nothing here reaches into a process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.devcluster_fixture import RunningCluster
from helpers.other_python import copy_checkout

REPO = Path(__file__).resolve().parents[2]
DATA = Path(__file__).resolve().parent.parent / "data"


def python_for(cluster: RunningCluster) -> str:
    """An interpreter with venv that the cluster's user may run."""
    real = str(Path(sys.executable).resolve())
    for candidate in (real, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            told = cluster.run_as_user([candidate, "-c", "import ensurepip, venv"])
        except (PermissionError, FileNotFoundError):
            continue
        if told.returncode == 0:
            return candidate
    raise AssertionError("no Python that every user may run has ensurepip: install python3-venv")


def install_for(cluster: RunningCluster,
                requirements: Sequence[str] = ("{tree}[demo,report]", "pytest", "pytest-xdist")
                ) -> Path:
    """A venv with this package in it, built from a copy of the tree, that every user may run."""
    return _installed(python_for(cluster), tuple(requirements))


@functools.cache  # pip takes as long as many tests
def _installed(python: str, requirements: tuple[str, ...]) -> Path:
    base = Path(tempfile.mkdtemp(prefix="tangram-site-", dir="/var/tmp"))  # on all nodes
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    base.chmod(0o755)
    tree, venv = base / "tree", base / "venv"
    copy_checkout(tree)
    # this pip installs for that interpreter: to unpack another one would take 6 s of CPU
    subprocess.run([python, "-m", "venv", "--without-pip", str(venv)], check=True)
    words = [r.format(tree=tree) for r in requirements]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(venv), "install", "-q",
                    "--no-compile", *words], check=True, timeout=300)
    if any("{tree}" in each for each in requirements):  # else it is a venv of other tools
        _compile(venv)
    return venv


# What the commands of users import. The cluster's user may keep no bytecode in the venv.
IMPORTED = ("tangram_hpc.app.local", "tangram_hpc.cli.views.acct_verb",
            "tangram_hpc.demo.demo_rank",
            "cryptography.x509", "mpi4py", "numpy.random", "pytest", "xdist.plugin")


def _compile(venv: Path) -> None:
    """Compiles the package, and of others the few hundred modules of 4,000 that are ever imported:
    5 s of CPU in the place of 20."""
    python = str(venv / "bin/python")
    package = subprocess.run(
        [python, "-c", "import os, tangram_hpc; print(os.path.dirname(tangram_hpc.__file__))"],
        cwd=venv, capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([python, "-m", "compileall", "-q", package], check=True)
    imports = "".join(f"with suppress(ImportError): import {name}\n" for name in IMPORTED)
    subprocess.run([python, "-c", f"from contextlib import suppress\n{imports}"], cwd=venv,
                   env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""}, check=True)


@dataclass
class Site:
    """A cluster, and where the package is installed on it."""

    cluster: RunningCluster
    venv: Path
    before: frozenset[str] = frozenset()

    def tangram(self, *words: str, timeout: float = 60, **environ: str
                ) -> subprocess.CompletedProcess[str]:
        """The `tangram` command from the login side."""
        return self.cluster.run_as_user([str(self.venv / "bin/tangram"), *words], timeout=timeout,
                                        env=environ)

    def sbatch(self, name: str, trainer: str, *files: str, ranks: int = 2, strict: bool = True,
               template: str = "hetjob", **keys: str) -> str:
        """Renders a trainers' template, submits it; the job's id."""
        for file in files:
            shutil.copy(DATA / file, self.cluster.home / file)
        het = {"partition_cpu": "cpu", "partition_gpu": "gpu", "partition_trainer": "trainer",
               "nodes_gpu": "2", "gres_gpu": "gpu:2", "mem_cpu": "600", "mem_gpu": "600"}
        options = {**(het if template == "hetjob" else {}), "time": "10", "ranks": str(ranks),
                   "trainer": trainer, **keys}
        return self.submit(template, name, strict=strict, **options)

    def submit(self, template: str, name: str, strict: bool = True, **keys: str) -> str:
        """Renders a template, submits it; the job's id."""
        options = {"job_name": name, "setup": f"source {self.venv}/bin/activate", **keys}
        words = [w for k, v in options.items() for w in ("-o", f"{k}={v}")]
        told = self.tangram("template", "render", template, *["--strict"] * strict, "--output",
                            f"{name}.sbatch", *words)
        assert told.returncode == 0, told.stderr
        told = self.cluster.run_as_user(["sbatch", "--parsable", f"{name}.sbatch"])
        assert told.returncode == 0, told.stderr
        return told.stdout.strip().split(";")[0]

    def script(self, name: str, text: str) -> str:
        """Submits a script of its own to one CPU node; the job's id. `{venv}` in it is filled in.
        """
        told = self.cluster.run_as_user(
            ["sbatch", "--parsable", "-J", name, "-p", "cpu", "-t", "5", "-n", "1", "-o",
             f"{name}-%j.out"], input=text.format(venv=self.venv))
        assert told.returncode == 0, told.stderr
        return told.stdout.strip()

    def state(self, job: str) -> str:
        """Slurm's word for the job, or for a het job's first component, as squeue lists others that
        wait before it; empty when it has gone from the queue."""
        told = self.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%i %T"])
        rows = [line.split() for line in told.stdout.splitlines()] if told.returncode == 0 else []
        own = [state for number, state in rows if number in (job, f"{job}+0")]
        return (own or [state for _, state in rows] or [""])[0]

    def output(self, name: str, job: str) -> str:
        """What the job printed so far."""
        path = self.cluster.home / f"{name}-{job}.out"
        return path.read_text() if path.exists() else ""

    def finish(self, name: str, job: str, timeout: float = 120) -> str:
        """Waits for the job's end; what it printed."""
        active = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        self.until(lambda: self.state(job) not in active, f"job {job} to end", timeout,
                   lambda: self.output(name, job))
        return self.output(name, job)

    def until(self, true: Callable[[], Any], what: str, timeout: float = 60,
              told: Callable[[], str] = str) -> Any:
        """Polls until something is true; the failure says what was awaited. It waits between two
        looks as long as a look takes, and at least 0.2 s: what is awaited needs the cores too."""
        deadline = time.monotonic() + timeout
        while (began := time.monotonic()) < deadline:
            if value := true():
                return value
            time.sleep(max(0.2, time.monotonic() - began))
        raise AssertionError(f"waited {timeout:.0f} s for {what}: {told()}")

    def info(self, job: str) -> dict[str, Any]:
        """`tangram info --json`; empty while the job does not answer."""
        told = self.tangram("info", "-j", job, "--json")
        return json.loads(told.stdout) if told.returncode == 0 else {}

    def acct(self, job: str) -> list[dict[str, Any]]:
        """`tangram acct --json`."""
        told = self.tangram("acct", "-j", job, "--json")
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)["actions"]

    def sacct_steps(self, job: str) -> list[str]:
        """The job's steps as sacct has them, once the job's records are complete."""
        def complete() -> list[str]:
            told = self.cluster.run_as_user(
                ["sacct", "-n", "-P", "-j", job, "-o", "JobID,State"]).stdout.splitlines()
            steps = [row for row in told if "." in row.split("|")[0]]
            known = len(told) - len(steps) == 3 and len(steps) >= 4  # components, batch and srun's
            return [] if "RUNNING" in " ".join(told) or not known else steps
        self.until(complete, "sacct to have the steps", 60)
        time.sleep(3)  # what came with them would be there by now
        return complete()

    def components(self, job: str) -> list[str]:
        """`State|ExitCode` of the job's components, as sacct has them so far."""
        return self.cluster.run_as_user(
            ["sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode"]).stdout.splitlines()

    def __post_init__(self) -> None:
        self.before = frozenset(self.left_behind())  # of an earlier user with the same number

    def left_behind(self, dead: Collection[str] = ()) -> list[str]:
        """What must not be there when no job runs: processes, and scratch folders and shared
        memory on this host or on a node; on `dead` nodes nobody could remove them."""
        uid, files = pwd.getpwnam(self.cluster.user).pw_uid, set()
        for root in ("/", *[root for node, root in self.roots.items() if node not in dead]):
            for base in ("tmp", "dev/shm"):
                for top in Path(root, base).iterdir():
                    with contextlib.suppress(FileNotFoundError):  # it goes just now
                        if not top.name.startswith("devcluster-") and top.lstat().st_uid == uid:
                            files.add(str(top))
        return sorted(files - self.before) + [
            str(pid) for pid in self.pids("tangram|sleep 432|trainer_")]

    @functools.cached_property
    def roots(self) -> dict[str, str]:
        """Where this host sees the files of each node that has a /tmp of its own, by its name."""
        daemons = self.cluster.status()["daemons"]
        return {name.removeprefix("node-"): f"/proc/{daemon['pid']}/root"
                for name, daemon in daemons.items() if name.startswith("node-")}

    def left_on_nodes(self) -> list[str]:
        """The same on nodes that are network namespaces: all files there that are not root's, also
        those of subordinate users, mounts of jobs, and processes of the user."""
        found, uid = [], pwd.getpwnam(self.cluster.user).pw_uid
        for node, root in self.roots.items():
            for base in ("tmp", "dev/shm", "var/tmp"):
                for top in Path(root, base).iterdir():
                    if top.name.startswith("devcluster-") or str(top) in self.before:
                        continue
                    with contextlib.suppress(FileNotFoundError):  # it goes just now
                        found += [f"{node}: {p}" for p in (top, *top.rglob("*"))
                                  if p.lstat().st_uid]
            mounts = Path(root).with_name("mounts").read_text().splitlines()
            found += [f"{node}: {line}" for line in mounts if "tangram" in line]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid in (uid, *self._subordinate(uid)):
                    found.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r:.200}")
        return found

    def _subordinate(self, uid: int) -> range:
        """The numbers of the user's range; empty for none."""
        for line in Path("/etc/subuid").read_text().splitlines():
            name, first, count = line.split(":")
            if name == self.cluster.user:
                return range(int(first), int(first) + int(count))
        return range(0)

    def pids(self, pattern: str) -> list[int]:
        """The user's processes whose command line matches."""
        told = subprocess.run(["pgrep", "-u", self.cluster.user, "-f", pattern],
                              capture_output=True, text=True, check=False)
        return [int(p) for p in told.stdout.split()]

    def _is_up(self, name: str, job: str, ranks: int) -> bool:
        if self.output(name, job).count("connected") < ranks:
            return False
        told = self.info(job)
        return len(told.get("nodes", [])) == 4 and told["clients"] >= ranks

    @contextmanager
    def held(self, name: str, ranks: int = 2, **keys: str) -> Any:
        """A job that stays up until the block ends; yields its id."""
        stop = self.cluster.home / f"{name}.stop"
        job = self.sbatch(name, f"python trainer_hold.py {stop.name}", "trainer_hold.py",
                          ranks=ranks, **keys)
        try:
            self.until(lambda: self._is_up(name, job, ranks), "all workers and ranks to join", 90,
                       lambda: self.output(name, job))
            yield job
        finally:
            stop.touch()
            if self.state(job):
                self.finish(name, job)
