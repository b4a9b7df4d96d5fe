"""Where a job's files are: one private folder for each job, below `$TANGRAM_HOME` (default
`~/.tangram`).

A job's folder has mode 0700 and holds `access.json` and `worker.json`, the segments of the journal
(`journal`, `journal-1`, ...), `checkpoint`, `once/`, `store/` and logs. Sockets and sandboxes are
in a node-local scratch folder instead, since a shared file system carries neither well. The folder
of a job that has ended keeps its journal, so that accounting outlives the job.

The folder of a Slurm job is `jobs/JOB@CLUSTER`, since clusters that share a home may use the same
ids; the link `jobs/JOB` leads to the one that started last, for scripts. The folder of any other
run is `jobs/NAME`. A folder of another job with the same id is moved to `...~1`, `...~2`.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..atomic_file import replace_link
from ..errors import InvalidInput
from ..private_folder import PrivateFolder, is_abandoned
from ..sandbox.files import scratch
from ..slurm.job_environment import slurm_place
from .access import may_serve
from .job_folders import paths_of_jobs, remove_job_folder

KEPT_LOCAL_RUNS = 50
# `tangram doctor` has no folder with a lock around that of its probe, which lives for seconds only
_OURS = ("tangram-worker-", "tangram-broker-", "tangram-client-", "tangram-probe-")
_NODES = "tangram-node-"  # the templates make such a folder for a worker, and remove it
_PART_OF_JOB = re.compile(r"[0-9]+[.+_][0-9].*")  # `tangram acct -j` reads these as Slurm's words
_OF_JOB = re.compile(r"tangram-(node|worker|broker)-job[0-9]+-.+")  # names of folders in a job


def tangram_home(environ: Mapping[str, str]) -> Path:
    """Returns the folder of all jobs of this user; a `~` that came in quotes is a home here too."""
    named = environ.get("TANGRAM_HOME")
    if named:
        return Path(os.path.expanduser(named))
    return Path(environ.get("HOME") or os.path.expanduser("~")) / ".tangram"


def own_dir(environ: Mapping[str, str], job: str) -> Path:
    """Returns the folder where a broker of this job writes: `JOB@CLUSTER` in that Slurm job on a
    named cluster, else `JOB`.

    Raises:
        InvalidInput: The job's name cannot be the name of a folder, or the path is not UTF-8.
    """
    if (job.startswith("-") or not job.isprintable() or "," in job
            or _PART_OF_JOB.fullmatch(job)):
        raise _no_job_id(job)
    return _recorded_dir(environ, job)


def _recorded_dir(environ: Mapping[str, str], job: str) -> Path:
    """Returns what `own_dir` returns, also for a name that only earlier releases gave to a job.

    Raises:
        InvalidInput: as `own_dir`.
    """
    if not job or job[0] == "." or "/" in job:
        raise _no_job_id(job)
    place = slurm_place(environ)
    cluster = place.cluster if place is not None and place.job == job else ""
    home = tangram_home(environ)
    _check_utf8("TANGRAM_HOME", str(home))
    return home / "jobs" / (f"{job}@{cluster.replace('/', '_')}" if cluster else job)


def _no_job_id(job: str) -> InvalidInput:
    return InvalidInput(f"job: {job!r:.60} is not a job id: it cannot begin with `.` or `-`, hold "
                        "`/`, `,` or what cannot be printed, or look like a part of another job, "
                        "as 4711.2, 4711+1 and 4711_3 do")


def _check_utf8(setting: str, path: str) -> None:
    """Checks a folder whose path travels in messages, whose texts are UTF-8.

    Raises:
        InvalidInput: The path is not UTF-8.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{setting}: the path {path!r} is not UTF-8; set {setting} to another "
                           "folder") from None


def job_dir(environ: Mapping[str, str], job: str) -> Path:
    """Returns the folder of a job that is given as `ID` or `ID@CLUSTER`. The folder need not exist.

    For a bare id it takes, in this order: this cluster's folder, the folder whose broker runs, the
    folder that was started last.

    Raises:
        InvalidInput: Brokers with this id run on several clusters.
    """
    named = _recorded_dir(environ, job)
    here = named.with_name(f"{job}@{environ.get('SLURM_CLUSTER_NAME', '')}")
    for folder in (named, here):
        # `isdir` raises nothing for a folder that we may not enter
        if os.path.isdir(folder) and not os.path.islink(folder):
            return folder
    link = named.with_name(job)
    last = Path(os.path.realpath(link)) if os.path.islink(link) else link
    if os.path.isdir(last) and may_serve(last):
        return last
    found = map(Path, glob.glob(f"{glob.escape(str(named.parent / job))}@*"))
    others = [p for p in found if "~" not in p.name]
    alive = [p for p in others if may_serve(p)]
    if len(alive) > 1:
        raise InvalidInput(f"job: {job} runs on several clusters; name one of "
                           f"{', '.join(sorted(p.name for p in alive))}")
    return alive[0] if alive else last if os.path.isdir(last) or len(others) != 1 else others[0]


def make_job_dir(environ: Mapping[str, str], job: str) -> Path:
    """Makes the folder in which a broker of this job writes, with mode 0700, and returns it.

    Raises:
        InvalidInput: The folder cannot be made.
    """
    folder = own_dir(environ, job)
    try:
        make_own_dir(environ, folder)
        os.chmod(folder, 0o700)
        _prune(folder.parent)
    except OSError as error:
        raise InvalidInput(f"TANGRAM_HOME {tangram_home(environ)}: cannot make {folder} "
                           f"({error.strerror})") from None
    return folder


def make_own_dir(environ: Mapping[str, str], folder: Path) -> None:
    """Makes a job's folder; what is missing of it and of TANGRAM_HOME gets mode 0700.

    Whoever may write in a folder above could put a folder of their own in the place of the job's.
    Where TANGRAM_HOME is a link, its target is made, which the file system may have removed as old.

    Raises:
        OSError: A folder cannot be made.
    """
    for each in (tangram_home(environ), folder.parent, folder):
        real = Path(os.path.realpath(each))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.mkdir(mode=0o700, exist_ok=True)


def move_away(folder: Path) -> Path:
    """Renames a folder to the first of `...~1`, `...~2` that is free, and returns its new path."""
    number = 1
    while (there := folder.with_name(f"{folder.name}~{number}")).exists():
        number += 1
    folder.rename(there)
    return there


def link_last(folder: Path, job: str) -> Path | None:
    """Points the link `jobs/JOB` at this folder.

    A real folder of that name, from an earlier release, is moved away first.

    Returns:
        The new path of the folder that was moved away; None if there was none.
    """
    link, moved = folder.with_name(job), None
    if link == folder:
        return None
    if link.is_dir() and not link.is_symlink():
        moved = move_away(link)
    replace_link(link, folder.name)
    return moved


def known_jobs(environ: Mapping[str, str]) -> list[str]:
    """Returns the jobs that have a journal, the one that was written to last at the end. O(files).

    Raises:
        InvalidInput: The folder of all jobs cannot be read.
    """
    written: dict[str, int] = {}
    for folder in paths_of_jobs(tangram_home(environ)):
        if folder.is_symlink() or "~" in folder.name:
            continue
        for journal in folder.glob("journal*"):
            with suppress(OSError):  # it may be removed at this moment
                at = journal.stat().st_mtime_ns
                written[folder.name] = max(at, written.get(folder.name, 0))
    return sorted(written, key=lambda name: written[name])


def last_job(environ: Mapping[str, str]) -> str:
    """Returns the job whose journal was written to last.

    Raises:
        InvalidInput: No job has run here, or the folder of all jobs cannot be read.
    """
    known = known_jobs(environ)
    if not known:
        raise InvalidInput(
            f"TANGRAM_HOME {tangram_home(environ)}: no job has run here; name one with -j "
                           "or set TANGRAM_HOME")
    folder = tangram_home(environ) / "jobs" / known[-1]
    link = folder.with_name(folder.name.partition("@")[0])
    return link.name if link.is_symlink() and link.samefile(folder) else folder.name


def local_job_name() -> str:
    """Returns a new name for a run without Slurm."""
    import secrets

    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _prune(jobs: Path) -> None:
    """Removes the oldest runs without Slurm; the folders of Slurm jobs are the user's to remove."""
    local = sorted(jobs.glob("local-*"), key=lambda p: p.stat().st_mtime_ns)
    for old in local[: max(0, len(local) - KEPT_LOCAL_RUNS)]:
        with suppress(InvalidInput):  # the next start tries again
            remove_job_folder(old)


_YOUNG_S = 60.0  # seconds in which a new folder may not have its lock yet
# seconds in which the worker may not have started yet for which a template made a folder
_STARTS_S = 3600.0
# The Slurm job in which a broker or worker without Slurm, as of a LocalCluster, runs all the same.
SCRATCH_JOB = "TANGRAM_SCRATCH_JOB"


def make_scratch(environ: Mapping[str, str], named: str, what: str) -> Path:
    """Makes a new private node-local folder, which its maker removes at its end.

    Folders of this user whose makers are dead are removed first. The Slurm job's id is in the
    folder's name, for the site's epilog.

    Args:
        environ: The environment.
        named: The setting `scratch`; empty for SLURM_TMPDIR, TMPDIR or the system's default.
        what: "worker" or "broker", for the folder's name.

    Raises:
        InvalidInput: The folder cannot be made, or its path is not UTF-8.
    """
    base = named or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    _check_utf8("scratch", base)
    job = environ.get("SLURM_JOB_ID") or environ.get(SCRATCH_JOB, "")
    try:
        scratch.own(base)
        sweep_scratch(Path(base))
        if Path(base).name.startswith(_NODES):
            sweep_scratch(Path(base).parent)
        # its lock stays open until this process ends
        return Path(PrivateFolder(f"tangram-{what}-{f'job{job}-' if job else ''}", base).path)
    except OSError as error:
        raise InvalidInput(f"scratch {base}: cannot make a folder there ({error.strerror}); set "
                           "`scratch` to a node-local folder") from None


def remove_scratch(path: str) -> bool:
    """Removes the scratch folder of a job's worker, broker or node; returns whether it is gone.

    Raises:
        InvalidInput: The path is not absolute, or its name is not one that such a folder has.
    """
    if not os.path.isabs(path) or not _OF_JOB.fullmatch(os.path.basename(path)):
        raise InvalidInput(f"--remove: {path!r} is not a worker's scratch folder; give an absolute "
                           "path whose last name is like tangram-node-job7-x")
    return scratch.remove(path)


def sweep_scratch(base: Path) -> list[Path]:
    """Removes what dead processes of this user left in a scratch folder, and returns what was
    removed.
    """
    gone = []
    for folder in base.glob("tangram-*-*"):
        try:
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            # makes folders writable again, because they could not be removed otherwise
            scratch.own(folder)
            age_s = time.time() - about.st_mtime
            if folder.name.startswith(_NODES):
                gone += sweep_scratch(folder)
                # a removal that was ended halfway has moved folders up, to names that are hidden
                if age_s < _STARTS_S or any(p.name[0] != "." for p in folder.iterdir()):
                    continue
            elif not _abandoned(folder, age_s):
                continue
        except OSError:
            continue  # another process removes it at the same time
        if scratch.remove(str(folder)):
            gone.append(folder)
    return gone


def _abandoned(folder: Path, age_s: float) -> bool:
    known = is_abandoned(folder)
    return age_s > _YOUNG_S and folder.name.startswith(_OURS) if known is None else known
