"""Pure. What a broker asks of Slurm, and what Slurm says of jobs.

Law: Slurm's own words (states, reasons, option names); nothing here is guessed. A het job's
components are separate rows with one job id, the leader's.
"""

from __future__ import annotations

import msgspec

# Slurm's words, as `squeue -o %T` writes them; every other word means that it holds nodes
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                      "SPECIAL_EXIT"})
_OVER = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL",
                   "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"})


MARK = "tangram:"  # where our part of a Comment begins
COMMENT_MAX = 250  # characters of our part


def with_remark(old: str, text: str) -> str:
    """A Comment as it becomes: what others wrote, then our part in place of an earlier one."""
    others = old.partition(MARK)[0].rstrip(" ;")
    ours = f"{MARK} {text}"
    return f"{others}; {ours}" if others else ours


class JobOrder(msgspec.Struct, frozen=True):
    """A batch job to submit.

    Attributes:
        script: the batch script, `#!` first. Its `#SBATCH` lines count, as for sbatch.
        options: what sbatch takes as `--NAME=VALUE`, by long name without dashes; an empty value
            is a flag. They win over the script's own lines.
        environ: what the job finds in its environment besides its submitter's own, which comes
            without all that is Slurm's, MPI's or ours.
    """

    script: str
    options: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


class JobRef(msgspec.Struct, frozen=True):
    """A job, or one component of a het job by its offset; -1 for the whole job."""

    job: int
    component: int = -1

    def show(self) -> str:
        """As Slurm's commands take it: `7`, or `7+1`."""
        return f"{self.job}+{self.component}" if self.component >= 0 else str(self.job)


class JobView(msgspec.Struct, frozen=True):
    """A job, or one component of a het job, as Slurm has it now.

    Attributes:
        job: its id; of a component, the leader's.
        component: het offset; -1 where it is no het job.
        state: Slurm's word, such as PENDING, RUNNING, COMPLETING, CANCELLED.
        reason: Slurm's word for why it waits or ended so; empty for none.
        name, partition: its own; `partition` may be several while it waits.
        nodes: that it holds or held, each by name; empty while it waits.
        start_ns: epoch; when it started, or is expected to; 0 for not known.
        end_ns: epoch; when it ended, or its limit ends it; 0 for not known.
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
        """It holds no nodes and may still get some."""
        return self.state in _WAITING

    @property
    def over(self) -> bool:
        """It has ended and will not start again."""
        return self.state in _OVER

    @property
    def holds(self) -> bool:
        """It holds nodes."""
        return not self.waits and not self.over


class SlurmCalls(msgspec.Struct, frozen=True):
    """What a broker has asked of Slurm so far, and what stands in the way of more.

    Attributes:
        adapter: who asks: `cli` or `pyslurm`; empty where there is no Slurm.
        submits, queries, cancels, comments: calls that were made, by kind.
        failed: of all those, how many got no answer in time ("not now").
        refused: of all those, how many Slurm refused ("never").
        held_back: calls that were not made, as the budget was used up.
        closed_until_ns: epoch; no call is made before; 0 for none.
        last_error: the last failure in one line.
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
