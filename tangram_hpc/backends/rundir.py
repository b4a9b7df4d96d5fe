"""Where a job's files lie: one private folder a job, below `$TANGRAM_HOME` (default `~/.tangram`).

Law: `jobs/JOB/` holds `access.json`, `journal` (one a start), `once/`, `store/` and logs, mode
0700; sockets and sandboxes lie in a node-local scratch folder instead, since a shared file system
carries neither well. The folder of a job that has ended keeps its journal, so that accounting
outlives it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidInput
from .sandbox import scratch

KEPT_LOCAL_RUNS = 50
_OURS = ("tangram-worker-", "tangram-broker-")
_NODES = "tangram-node-"  # made by the templates around a worker's, and removed by their epilog


def home(environ: Mapping[str, str]) -> Path:
    """The folder of all jobs of this user."""
    named = environ.get("TANGRAM_HOME")
    if named:
        return Path(named)
    return Path(environ.get("HOME") or os.path.expanduser("~")) / ".tangram"


def job_dir(environ: Mapping[str, str], job: str) -> Path:
    """The folder of one job."""
    if not job or "/" in job or job.startswith("."):
        raise InvalidInput(f"job: {job!r} is not a job id")
    return home(environ) / "jobs" / job


def make_job_dir(environ: Mapping[str, str], job: str) -> Path:
    """The folder of one job, made with mode 0700 and noted as the last run."""
    folder = job_dir(environ, job)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
        _prune(folder.parent)
    except OSError as error:
        raise InvalidInput(f"TANGRAM_HOME {home(environ)}: cannot make {folder} "
                           f"({error.strerror})") from None
    return folder


def last_job(environ: Mapping[str, str]) -> str:
    """The job whose journal was written to last.

    Raises:
        InvalidInput: there is none.
    """
    begun = max((home(environ) / "jobs").glob("*/journal*"), default=None,
                key=lambda path: path.stat().st_mtime_ns)
    if begun is None:
        raise InvalidInput(f"TANGRAM_HOME {home(environ)}: no job has run here; name one with -j "
                           "or set TANGRAM_HOME")
    return begun.parent.name


def local_job_name() -> str:
    """A fresh name for a run without Slurm."""
    import secrets

    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _prune(jobs: Path) -> None:
    """Drops the oldest runs without Slurm; jobs of Slurm are the user's to remove."""
    local = sorted(jobs.glob("local-*"), key=lambda p: p.stat().st_mtime_ns)
    for old in local[: max(0, len(local) - KEPT_LOCAL_RUNS)]:
        shutil.rmtree(old, ignore_errors=True)


_ALIVE = ".alive"  # locked by who made the folder, for as long as that process lives
_YOUNG_S = 60.0  # a folder may be on its way to its lock
_STARTS_S = 3600.0  # a worker may be on its way to the folder that a template made for it
_locks: list[int] = []


def make_scratch(environ: Mapping[str, str], named: str, what: str) -> Path:
    """A fresh private node-local folder; its maker removes it. Those of this user whose makers are
    dead go first. The job's id is in its name, for the site's epilog."""
    base = named or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    job = environ.get("SLURM_JOB_ID", "")
    try:
        scratch.own(base)
        sweep_scratch(Path(base))
        if Path(base).name.startswith(_NODES):
            sweep_scratch(Path(base).parent)
        folder = tempfile.mkdtemp(prefix=f"tangram-{what}-{f'job{job}-' if job else ''}", dir=base)
        lock = os.open(f"{folder}/{_ALIVE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _locks.append(lock)
        return Path(folder)
    except OSError as error:
        raise InvalidInput(f"scratch {base}: cannot make a folder there ({error.strerror}); set "
                           "`scratch` to a node-local folder") from None


def sweep_scratch(base: Path) -> list[Path]:
    """Removes what dead processes of this user left in a scratch folder; returns what is gone."""
    gone = []
    for folder in base.glob("tangram-*-*"):
        try:
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            scratch.own(folder)  # else one whose mode was taken away would stay for ever
            age_s = time.time() - about.st_mtime
            if folder.name.startswith(_NODES):
                gone += sweep_scratch(folder)
                if age_s < _STARTS_S or any(folder.iterdir()):
                    continue
            elif not _abandoned(folder, age_s):
                continue
        except OSError:
            continue  # another one sweeps too
        if scratch.remove(str(folder)):
            gone.append(folder)
    return gone


def _abandoned(folder: Path, age_s: float) -> bool:
    try:
        lock = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return age_s > _YOUNG_S and folder.name.startswith(_OURS)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
