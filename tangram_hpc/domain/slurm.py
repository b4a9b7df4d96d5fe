"""Defines the broker's requests to Slurm, and Slurm's reports about jobs. Pure.

States, reasons and names of options are Slurm's own words, and nothing is guessed. The components
of a heterogeneous job are separate rows with one job id, that of the leader.
"""

from __future__ import annotations

import msgspec

# Slurm's words, as `squeue -o %T` writes them. In every other state a job holds nodes.
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                      "SPECIAL_EXIT"})
_OVER = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED",
                   "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED",
                   "TIMEOUT"})


MARK = "tangram:"  # our part of a Comment begins with this
COMMENT_MAX = 250  # characters of our part


def with_job_comment(old: str, text: str) -> str:
    """Returns a job's Comment with our part replaced by `text`, and the text of others unchanged.
    """
    others = old.partition(MARK)[0].rstrip(" ;")
    ours = f"{MARK} {text}"
    return f"{others}; {ours}" if others else ours


class JobOrder(msgspec.Struct, frozen=True):
    """A batch job to submit.

    Attributes:
        script: the batch script, with `#!` first. Its `#SBATCH` lines count, as they do for sbatch.
        options: what sbatch takes as `--NAME=VALUE`, by long name without dashes; an empty value
            makes a flag. Options win over the lines in the script.
        environ: variables that are added to the job's environment. The rest of the environment is
            the submitter's, without the variables of Slurm, of MPI and of this package.
    """

    script: str
    options: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


class JobRef(msgspec.Struct, frozen=True):
    """A job, or one component of a heterogeneous job by its offset; -1 for the whole job."""

    job: int
    component: int = -1

    def show(self) -> str:
        """Returns the reference as Slurm's commands take it: `7`, or `7+1`."""
        return f"{self.job}+{self.component}" if self.component >= 0 else str(self.job)


class JobView(msgspec.Struct, frozen=True):
    """Slurm's present view of a job, or of one component of a heterogeneous job.

    Attributes:
        job: its id; for a component, the id of the leader.
        component: its het offset; -1 if the job is not heterogeneous.
        state: Slurm's word, such as PENDING, RUNNING, COMPLETING or CANCELLED.
        reason: the Reason that Slurm gives for its waiting or its end; empty for none.
        name: its name.
        partition: its partition; while it waits there may be several.
        nodes: names of the nodes that it holds or held; empty while it waits.
        start_ns: when it started or is expected to, in ns since the epoch; 0 if not known.
        end_ns: when it ended, or when its time limit ends it; 0 if not known.
        restarts: how often it was requeued.
        comment: its Comment.
    """

    job: int
    component: int
    state: str
    reason: str = ""
    name: str = ""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    restarts: int = 0
    comment: str = ""

    @property
    def waits(self) -> bool:
        """Whether it holds no nodes and may still get some."""
        return self.state in _WAITING

    @property
    def over(self) -> bool:
        """Whether it has ended and will not start again."""
        return self.state in _OVER

    @property
    def holds(self) -> bool:
        """Whether it holds nodes."""
        return not self.waits and not self.over

    @property
    def prepares(self) -> bool:
        """Whether it holds nodes but has not begun on them: they still boot, as where the site
        turns idle nodes off, or the site's prolog still runs. While nodes boot, the start time is
        that of the grant; Slurm replaces it when they are ready.
        """
        return self.state == "CONFIGURING" or (self.state == "RUNNING" and self.reason == "Prolog")


class JobSpan(msgspec.Struct, frozen=True):
    """A time in which a job, or a component of one, held nodes, as Slurm's accounting has it.

    Attributes:
        job: its raw id, sacct's JobIDRaw, such as `7`; for a component sacct's JobID, `7+1`.
        submit_s: the submit time of this start of the job, epoch seconds.
        start_ns: when it began, in ns since the epoch; whole seconds.
        end_ns: when it ended; 0 if it has not.
    """

    job: str
    submit_s: int
    start_ns: int
    end_ns: int


class SlurmCalls(msgspec.Struct, frozen=True):
    """Counts of the broker's calls to Slurm, and the reason why no more are made now.

    Attributes:
        adapter: the adapter that calls Slurm, `cli` or `pyslurm`; empty where there is no Slurm.
        submits, queries, cancels, comments: how many calls were made, by kind.
        failed: how many calls got no answer in time.
        refused: how many calls Slurm rejected.
        held_back: how many calls were not made because the budget was used up.
        closed_until_ns: no call is made before this time, in ns since the epoch; 0 for none.
        last_error: the last failure, in one line.
    """

    adapter: str = ""
    submits: int = 0
    queries: int = 0
    cancels: int = 0
    comments: int = 0
    failed: int = 0
    refused: int = 0
    held_back: int = 0
    closed_until_ns: int = 0
    last_error: str = ""
