"""Takes a job's folder for its broker, after a check that no other job or broker owns it.

Nothing in the folder is read before the folder is known to be this job's (`storage.identity`) and
held by no other broker (`storage.folder_lock`). A folder of another job with the same id is moved
away whole, with journal, kept results and store. One line on standard error says where it went;
nothing is deleted.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidInput, TangramError
from ..ports import SlurmRejected, SlurmTransient
from ..slurm.commands import Commands
from ..slurm.job_environment import slurm_place
from ..storage.folder_lock import SILENT_S, YIELD_S, FileLock, FolderLock, holder_of, last_sign
from ..storage.identity import JobStart, read_starts, why_foreign, write_starts
from ..storage.journal_segments import journals
from ..storage.rundir import link_last, make_job_dir, move_away

_ASK_S = 30.0  # deadline of the one query to Slurm
_PAUSES_S = (3.0,)  # pauses before further tries, if the controller does not answer


async def take_folder(environ: Mapping[str, str], job: str) -> tuple[FolderLock, int]:
    """Takes the folder of a job for its broker; no other broker writes there from now on. Returns
    it, and when Slurm granted the job its nodes, in ns since the epoch; 0 if that is not known.

    A run outside of Slurm is identified by its name alone. For a Slurm job, Slurm is asked once
    when the job was submitted and granted its nodes.

    Raises:
        InvalidInput: the folder cannot be made or written.
        TangramError: another broker serves this job; the message says which.
    """
    folder, slurm = make_job_dir(environ, job), Commands(environ, _ASK_S)
    now, granted_s = await _start(environ, job, slurm)
    file_lock, foreign = FileLock(folder), ""
    starts = read_starts(folder)
    if now is not None and (starts or journals(folder)):
        foreign = await why_foreign(starts, now, lambda: slurm.accounted(job))
    if not file_lock.held:
        await _refuse_if_alive(folder, job, None if foreign else now)
    try:
        if foreign:
            print(f"tangram: broker: job folder {folder} is not this job's: {foreign}; it is now "
                  f"{move_away(folder)}", file=sys.stderr)
            file_lock.release()
            file_lock, starts = FileLock(make_job_dir(environ, job)), []
        if now is not None:
            write_starts(folder, [*(s for s in starts if s != now), now])
        folder_lock = FolderLock(folder, file_lock, -1 if now is None else now.restarts)
        if now is not None:
            _link(folder, job)
    except OSError as error:
        raise InvalidInput(f"job folder {folder}: cannot write there ({error.strerror})") from None
    if folder_lock.earlier:
        await asyncio.sleep(YIELD_S)  # an earlier broker that lives has noticed by then
    return folder_lock, granted_s * 10**9


def _link(folder: Path, job: str) -> None:
    """Makes `jobs/JOB` a symbolic link to this folder.

    The link is not made while a broker outside of Slurm, to which a user gave this job's number as
    its name, serves in a folder of that name.
    """
    link = folder.with_name(job)
    if link.is_dir() and not link.is_symlink():
        file_lock = FileLock(link)
        file_lock.release()
        if not file_lock.held:
            return
    if (moved := link_last(folder, job)) is not None:
        print(f"tangram: broker: {link} was made by an earlier release and does not say whose it "
              f"is; it is now {moved}", file=sys.stderr)


async def _start(environ: Mapping[str, str], job: str, slurm: Commands
                 ) -> tuple[JobStart | None, int]:
    """Returns which start of which Slurm job this is, and when that was granted its nodes, in epoch
    seconds; None and 0 outside of a Slurm job.
    """
    place = slurm_place(environ)
    if place is None or place.job != job:
        return None, 0
    submitted_s, granted_s = await _start_times(job, slurm)
    return JobStart(place.cluster, job, submitted_s, place.restarts), granted_s


async def _start_times(job: str, slurm: Commands) -> tuple[int, int]:
    """Returns when the job was submitted and granted its nodes, in epoch seconds.

    If Slurm does not tell, both are 0, and a line on standard error says so. The query is
    tried again first: a controller that is being restarted answers soon, and after a wrong 0 the
    job's own results would be moved away.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            return await slurm.start_times(job)
        except (SlurmRejected, SlurmTransient) as failed:
            if pause_s is None or isinstance(failed, SlurmRejected):
                print(f"tangram: broker: Slurm does not tell when job {job} was submitted: "
                      f"{failed}", file=sys.stderr)
                return 0, 0
            await asyncio.sleep(pause_s)
    return 0, 0


async def _refuse_if_alive(folder: Path, job: str, now: JobStart | None) -> None:
    """Returns only if the broker that holds a locked folder is known to have ended.

    - The holder belongs to an earlier start of our own job: Slurm ended that start before this one.
    - The holder is on another host and has not shown for a while that it lives: its node is gone,
      and the file system has not noticed yet.

    Raises:
        TangramError: the holder is alive, as far as can be told.
    """
    holder = holder_of(folder)
    if holder is not None and now is not None and 0 <= holder.restarts < now.restarts:
        return
    if holder is not None and holder.host != socket.gethostname():
        sign, until = last_sign(folder), time.monotonic() + SILENT_S
        while last_sign(folder) == sign:
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.5)
    who = holder.show() if holder is not None else "it is just starting"
    raise TangramError(f"job {job}: another broker serves it ({who}; folder {folder}); end that "
                       f"one first (`tangram shutdown -j {job}`), or take another --job")
