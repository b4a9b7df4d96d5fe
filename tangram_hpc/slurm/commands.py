"""The Slurm adapter that uses Slurm's commands: sbatch, squeue, scancel, scontrol, sacct, sacctmgr.

Every command runs as a child with a deadline, and is killed with its process group when the call
ends. Its environment has no variables of the caller's job, since inside a job `SLURM_*` and
`SQUEUE_*` change what a command means. We read chosen fields of `squeue -O` and not `--json`: every
release has `-O`, and it costs a tenth.
"""

from __future__ import annotations

import asyncio
import calendar
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from ..domain.slurm import JobOrder, JobRef, JobSpan, JobView, with_job_comment
from ..ports import SlurmRejected, SlurmTransient
from .adapter import checked_comment, comment_of, failure, says_over, says_unknown, wanted
from .hostlist import expand
from .job_environment import slurm_command_environment

DEADLINE_S = 60.0  # Slurm's own MessageTimeout is 10 s by default, and sites raise it
_FIELDS = ("JobID", "UserID", "HetJobID", "HetJobOffset", "State", "Reason", "Name", "Partition",
           "NodeList", "StartTime", "EndTime", "RestartCnt", "Comment", "JobArrayID")
_CUT, _END = "\x1f", "\x1e"  # separate fields and rows: no name or comment contains them
# width 0: squeue does not cut the field
_FORMAT = ",".join(f"{field}:0{_CUT}" for field in _FIELDS) + _END
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}
_NOTHING = ("", "(null)", "None", "N/A", "Unknown", "NONE")
_YEAR_NS = 365 * 86_400 * 10**9  # the end that Slurm itself gives a job without a time limit


class Commands:
    """The adapter over Slurm's commands; see `adapter.SlurmAdapter`.

    Args:
        environ: the caller's environment, which leads to the commands and their configuration.
        deadline_s: how long one command may take, seconds; then it is killed.
    """

    def __init__(self, environ: Mapping[str, str], deadline_s: float = DEADLINE_S) -> None:
        self._environ, self._deadline_s = slurm_command_environment(environ), deadline_s

    @property
    def name(self) -> str:
        """Always `cli`; see `adapter.SlurmAdapter.name`."""
        return "cli"

    async def submit(self, order: JobOrder) -> int:
        """Submits through sbatch; see `adapter.SlurmAdapter.submit`."""
        words = [f"--{name}={value}" if value else f"--{name}" for name, value in order.options]
        output = await self._run(["sbatch", "--parsable", *words], order.script.encode(),
                                 dict(order.environ))
        number = output.strip().rpartition("\n")[2].partition(";")[0]
        if not number.isdigit():
            raise SlurmTransient(f"sbatch: answered {output.strip()[:80]!r}, no job id",
                                 unsure=True)
        return int(number)

    async def query(self, jobs: Sequence[int], names: Sequence[str]) -> tuple[JobView, ...]:
        """Queries through squeue; see `adapter.SlurmAdapter.query`.

        The controller is asked for a single job by its id, and else for all jobs of this user.
        """
        rows = await self._rows(jobs, names)
        return wanted([view for row in rows if (view := _view(row)) is not None], jobs, names)

    async def _rows(self, jobs: Sequence[int], names: Sequence[str]) -> list[dict[str, str]]:
        """Returns squeue's rows, by `_FIELDS`; none for a job that it does not know."""
        one = len(jobs) == 1 and not names
        which = ["-j", str(jobs[0])] if one else ["-u", str(os.geteuid())]
        try:
            output = await self._run(["squeue", "-h", "-a", "-t", "all", *which, "-O", _FORMAT],
                                     b"", {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC0"})
        except SlurmRejected as never:
            if says_unknown(never):
                return []
            raise
        return [dict(zip(_FIELDS, map(str.strip, row.split(_CUT)), strict=False))
                for row in output.split(_END) if row.strip()]

    async def cluster(self) -> str:
        """Returns the name of the cluster; empty if its configuration does not tell."""
        output = await self._run(["scontrol", "show", "config"])
        found = re.search(r"^ClusterName\s*=\s*(\S+)", output, re.MULTILINE)
        return found[1] if found else ""

    async def cancel(self, jobs: Sequence[JobRef]) -> None:
        """Cancels all jobs with one scancel; see `adapter.SlurmAdapter.cancel`."""
        if jobs:
            await self._run(["scancel", *(each.show() for each in jobs)])

    async def comment(self, job: int, text: str) -> None:
        """Sets our line of a Comment; see `adapter.SlurmAdapter.comment`.

        The controller keeps the Comment while the job runs; afterwards only accounting has the job.
        """
        checked_comment(text)
        rows = await self._rows([job], ())
        old = comment_of(wanted([view for row in rows if (view := _view(row)) is not None],
                                [job], ()))
        if old is not None:
            element = next((row["JobArrayID"] for row in rows if row["JobID"] == str(job)), "")
            try:
                await self._run(["scontrol", "update", f"jobid={_one_job(job, element)}",
                                 f"comment={with_job_comment(old, text)}"])
                return
            except SlurmRejected as never:
                if not says_over(never):
                    raise
        output = await self._run(["sacct", "-n", "-X", "-P", "-j", str(job), "-o",
                                  "JobIDRaw,JobID,Comment"])
        told = (line.split("|", 2) for line in output.splitlines())
        element, old = next(((row[1], row[2]) for row in told if row[0] == str(job)), ("", ""))
        output = await self._run(["sacctmgr", "-i", "modify", "job", "where",
                                  f"jobid={_one_job(job, element)}", "set",
                                  f"comment={with_job_comment(old, text)}"])
        if "nothing modified" in output.lower():
            raise SlurmRejected(f"comment: accounting has no job {job}, or not yet")

    async def start_times(self, job: str) -> tuple[int, int]:
        """Returns when a job of the queue was submitted, and when it was granted its nodes, epoch
        seconds; zeros for an unknown job.

        For a requeued job, Slurm gives the times of its last requeue and of its last grant.
        """
        output = await self._run(
            ["squeue", "-h", "-a", "-t", "all", "-j", job, "-O",
             f"JobID:0{_CUT},SubmitTime:0{_CUT},StartTime:0{_CUT}"], b"", _EPOCH)
        rows = [[word.strip() for word in line.split(_CUT)] for line in output.split("\n")]
        return max(((_number(row[1]), _number(row[2])) for row in rows if row[0] == job),
                   default=(0, 0))

    async def accounted(self, job: str) -> list[int]:
        """Returns the submit times of all starts of all jobs that ever had this id, epoch seconds.

        The list is empty where there is no accounting.
        """
        try:
            output = await self._run(["sacct", "-n", "-X", "-P", "--duplicates", "-j", job, "-S",
                                      "1970-01-02", "-o", "JobIDRaw,Submit,State"], b"", _EPOCH)
        except (SlurmRejected, SlurmTransient):
            return []
        rows = [line.split("|") for line in output.splitlines()]
        return sorted(set(_start_submits(
            (job, _number(row[1]), row[2]) for row in rows if len(row) == 3 and row[0] == job
        ).values()))

    async def spans(self, jobs: Collection[str]) -> list[JobSpan]:
        """Returns when each start of each of these jobs held nodes, by accounting, for a
        heterogeneous job a span for each of its components.

        An element of a job array is named by its raw id, as in SLURM_JOB_ID, and a component by
        `LEADER+OFFSET`. A job that lost a node has several rows, one after the other; they are one
        span.

        Raises:
            SlurmRejected: there is no accounting.
            SlurmTransient: accounting does not answer.
        """
        output = await self._run(["sacct", "-n", "-X", "-P", "--duplicates", "-j", ",".join(jobs),
                                  "-S", "1970-01-02", "-o",
                                  "JobIDRaw,JobID,Submit,Start,End,State"], b"", _EPOCH)
        told = (line.split("|") for line in output.splitlines())
        rows = [(row[1] if "+" in row[1] else row[0], _number(row[2]), _number(row[3]),
                 _number(row[4]), row[5]) for row in told if len(row) == 6]
        first = _start_submits((job, submit, state) for job, submit, _, _, state in rows)
        found: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for job, submit, start, end, _ in rows:
            if start:
                found.setdefault((job, first[job, submit]), []).append((start, end))
        return [JobSpan(job, submit, min(start for start, _ in held) * 10**9,
                        max(end for _, end in held) * 10**9 if all(end for _, end in held) else 0)
                for (job, submit), held in found.items()]

    async def close(self) -> None:
        """See `adapter.SlurmAdapter.close`; a call that is cancelled ends its own command."""

    async def _run(self, argv: list[str], stdin: bytes = b"",
                   more: Mapping[str, str] | None = None) -> str:
        """Runs a command and returns its output.

        Raises:
            SlurmRejected: Slurm rejected the call, or there is no such command.
            SlurmTransient: the command could not run, was late, or Slurm is away.
        """
        conf = self._environ.get("SLURM_CONF", "")
        # without this check, the commands would try for a minute
        if conf and not os.path.exists(conf):
            raise SlurmTransient(f"SLURM_CONF names {conf}, which does not exist")
        try:
            child = await asyncio.create_subprocess_exec(
                *argv, env={**self._environ, **(more or {})}, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE)
        except FileNotFoundError:
            raise SlurmRejected(f"{argv[0]} is not on the PATH: load the site's Slurm module"
                             ) from None
        except OSError as error:
            raise SlurmTransient(f"{argv[0]}: {error.strerror}") from None
        out, err = bytearray(), bytearray()
        try:
            await asyncio.wait_for(_talk(child, stdin, out, err), self._deadline_s)
        except asyncio.TimeoutError:
            # sbatch repeats for two minutes what a full job table refuses, and says so at once
            said = "; ".join(["", *_errors(argv[0], err)])
            raise SlurmTransient(f"{argv[0]}: no answer in {self._deadline_s:g} s{said}",
                                 unsure=True) from None
        finally:
            await _end(child)
        if child.returncode:
            errors = _errors(argv[0], err) or _errors(argv[0], out)
            if not errors:
                raise SlurmRejected(f"{argv[0]}: exit status {child.returncode}")
            raise failure(f"{argv[0]}: {'; '.join(errors)}", by=errors[-1])
        return out.decode(errors="replace")


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kills a command that still runs, with its process group, and reaps it."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await asyncio.shield(child.wait())


async def _talk(child: asyncio.subprocess.Process, stdin: bytes, out: bytearray, err: bytearray
                ) -> None:
    """Writes a command's standard input and reads what it writes, until it ends. What was read
    stays in `out` and `err` if this is cancelled.
    """
    async def read(stream: asyncio.StreamReader | None, into: bytearray) -> None:
        assert stream is not None
        while part := await stream.read(1 << 16):
            into += part

    async def write(stream: asyncio.StreamWriter | None) -> None:
        assert stream is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # a command that did not read it
            stream.write(stdin)
            await stream.drain()
        stream.close()

    # all at once: a command may write more than a pipe holds before it reads
    await asyncio.gather(write(child.stdin), read(child.stdout, out), read(child.stderr, err))
    await child.wait()


def _errors(command: str, text: bytes | bytearray) -> list[str]:
    """Returns what a command says of its failure: its lines `COMMAND: error: TEXT`, and its last
    line, whatever that begins with.

    sbatch names the limit, or the site's own words for a refusal, in lines before its last one. The
    last line of squeue is `slurm_load_jobs error: TEXT`, and what comes before it may be a warning
    of slurm.conf.
    """
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    start = f"{command}: error:"
    told = [line for line in lines[:-1] if line.startswith(start)] + lines[-1:]
    return [line.removeprefix(f"{command}:").strip().removeprefix("error:").strip()
            for line in told]


# ---- what squeue writes --------------------------------------------------------------------------


def _view(row: Mapping[str, str]) -> JobView | None:
    """Returns a row of squeue as a JobView, or None if the job is another user's.

    Raises:
        SlurmRejected: the row does not have the requested fields.
    """
    try:
        if int(row["UserID"]) != os.geteuid():
            return None
        leader = _number(row["HetJobID"])
        nodes = expand(_text(row["NodeList"]))
        starts = _stamp(row["StartTime"])
        ends = starts + _YEAR_NS if row["EndTime"] == "NONE" else _stamp(row["EndTime"])
        return JobView(
            leader or int(row["JobID"]), _number(row["HetJobOffset"]) if leader else -1,
            row["State"], _text(row["Reason"]), row["Name"], row["Partition"], nodes,
            starts, ends, _number(row["RestartCnt"]), _text(row["Comment"]))
    except (KeyError, ValueError) as error:
        raise SlurmRejected(f"squeue: a row that is not understood ({error}): "
                            f"{list(row.values())[:3]}") from None


def _one_job(job: int, told: str) -> str:
    """Returns how Slurm's commands name this job and no other one.

    The last element of a job array has the number of the whole array, so a command that is given
    this number changes all elements (seen with Slurm 22.05).

    Args:
        job: the job's own number.
        told: how Slurm shows it; `ARRAY_INDEX` for an element of an array.
    """
    return told if re.fullmatch(r"\d+_\d+", told) else str(job)


def _text(word: str) -> str:
    return "" if word in _NOTHING else word


def _start_submits(rows: Iterable[tuple[str, int, str]]) -> dict[tuple[str, int], int]:
    """Returns the submit time of the start to which each row of sacct belongs, by the row's job and
    submit time.

    A job that loses a node, and works on, gets a new row. Accounting gives that row the time of the
    loss as its submit time (seen with Slurm 22.05), and the row before it the state RESIZING.

    Args:
        rows: job, submit time and state of each row, in any order.
    """
    found: dict[tuple[str, int], int] = {}
    resized: dict[str, int] = {}
    # of two rows of the same second, the one that was resized is the earlier one
    for job, submit, state in sorted(rows, key=lambda row: (*row[:2], row[2] != "RESIZING")):
        found[job, submit] = start = resized.pop(job, submit)
        if state == "RESIZING":
            resized[job] = start
    return found


def _number(word: str) -> int:
    return int(word) if word.isdigit() else 0


def _stamp(word: str) -> int:
    """Returns a UTC time such as 2026-01-31T23:59:59 as epoch ns; 0 for none."""
    if word in _NOTHING:
        return 0
    return calendar.timegm(time.strptime(word, "%Y-%m-%dT%H:%M:%S")) * 10**9
