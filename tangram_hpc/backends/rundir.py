"""Where a job's files lie: one private folder a job, below `$TANGRAM_HOME` (default `~/.tangram`).

Law: `jobs/JOB/` holds `access.json`, `journal`, `store/` and logs, mode 0700; sockets and sandboxes
lie in a node-local scratch folder instead, since a shared file system carries neither well. The
folder of a job that has ended keeps its journal, so that accounting outlives it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidInput

KEPT_LOCAL_RUNS = 50


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
    begun = max((home(environ) / "jobs").glob("*/journal"), default=None,
                key=lambda path: path.stat().st_mtime_ns)
    if begun is None:
        raise InvalidInput(f"TANGRAM_HOME {home(environ)}: no job has run here; name one with -j "
                           "or set TANGRAM_HOME")
    return begun.parent.name


def local_job_name() -> str:
    """A fresh name for a run without Slurm."""
    import secrets
    import time

    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _prune(jobs: Path) -> None:
    """Drops the oldest runs without Slurm; jobs of Slurm are the user's to remove."""
    local = sorted(jobs.glob("local-*"), key=lambda p: p.stat().st_mtime_ns)
    for old in local[: max(0, len(local) - KEPT_LOCAL_RUNS)]:
        shutil.rmtree(old, ignore_errors=True)


def make_scratch(environ: Mapping[str, str], named: str, what: str) -> Path:
    """A fresh private node-local folder; its maker removes it."""
    base = named or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp(prefix=f"tangram-{what}-", dir=base))
    except OSError as error:
        raise InvalidInput(f"scratch {base}: cannot make a folder there ({error.strerror}); set "
                           "`scratch` to a node-local folder") from None
