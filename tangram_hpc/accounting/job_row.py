"""Folds a job's events into one row about the job itself, as sacct has one above its steps. Pure.

Slurm's own accounting knows nothing of actions, and tools that read sacct's output take the figures
of the job from its row and those of actions from the rows below it. The fold takes one pass,
O(events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..domain import event as ev
from .fields import Field, duration, stamp
from .held_usage import HeldUsage, total
from .record import Fold
from .starts import without_gaps


@dataclass(frozen=True)
class JobRow:
    """One job. Times are in ns since the epoch, by the broker's clock.

    Attributes:
        job: the Slurm job, or the name of another run.
        user: who ran it.
        running: whether its broker has not ended.
        start_ns: when its broker first began.
        end_ns: when its broker ended, or the last event of one that runs.
        nodes: names of the nodes that it lent.
        partitions: the components of these nodes.
        cpus: CPUs of these nodes.
        mem_mib: memory of these nodes, MiB.
        gpus: GPUs of these nodes.
        held_ns: core-ns that its nodes were held.
        cpu_ns: CPU time that the processes of its actions used.
    """

    job: str
    user: str
    running: bool
    start_ns: int
    end_ns: int
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]
    cpus: int
    mem_mib: int
    gpus: int
    held_ns: int
    cpu_ns: int


def fold_with_job(events: Iterable[ev.Event]) -> tuple[Fold, JobRow]:
    """Returns the fold of all events, and the row of their job."""
    fold, usage = Fold(), HeldUsage()
    specs, began, running = {}, 0, True
    for event in without_gaps(events):
        fold.add(event)
        usage.add(event)
        if isinstance(event, ev.NodeJoined):
            specs[event.spec.name] = event.spec
        elif isinstance(event, ev.BrokerStarted):
            began, running = began or event.at, True
        elif isinstance(event, ev.BrokerStopped):
            running = False
    fold.close()
    usage.close()
    held_ns, _ = total(usage.rows.values())
    user = next((record.user for record in fold.records.values()), "")
    return fold, JobRow(
        fold.job, user, running, began, fold.last_ns, tuple(specs),
        tuple(dict.fromkeys(spec.component for spec in specs.values() if spec.component)),
        sum(len(spec.cores) for spec in specs.values()),
        sum(spec.mem_mib for spec in specs.values()), sum(len(s.gpus) for s in specs.values()),
        held_ns, fold.usage.burnt_ns)


def _tres(row: JobRow) -> str:
    return f"cpu={row.cpus},mem={row.mem_mib}M,node={len(row.nodes)}" + (
        f",gres/gpu={row.gpus}" if row.gpus else "")


_TEXTS: dict[str, Callable[[JobRow], str]] = {
    "JobID": lambda r: r.job,
    "JobIDRaw": lambda r: r.job,
    "User": lambda r: r.user,
    "Partition": lambda r: ",".join(r.partitions),
    "NodeList": lambda r: ",".join(r.nodes) or "None assigned",
    "NNodes": lambda r: str(len(r.nodes)),
    "State": lambda r: "RUNNING" if r.running else "COMPLETED",
    "ExitCode": lambda r: "0:0",
    "Submit": lambda r: stamp(r.start_ns),
    "Start": lambda r: stamp(r.start_ns),
    "End": lambda r: "Unknown" if r.running else stamp(r.end_ns),
    "Elapsed": lambda r: duration(r.end_ns - r.start_ns),
    "ElapsedRaw": lambda r: str((r.end_ns - r.start_ns) // 10**9),
    "ReqCPUS": lambda r: str(r.cpus),
    "NCPUS": lambda r: str(r.cpus),
    "AllocCPUS": lambda r: str(r.cpus),
    "CPUTime": lambda r: duration(r.held_ns),
    "CPUTimeRAW": lambda r: str(r.held_ns // 10**9),
    "TotalCPU": lambda r: duration(r.cpu_ns),
    "ReqMem": lambda r: f"{r.mem_mib}M",
    "ReqTRES": _tres,
    "AllocTRES": _tres,
    "Timelimit": lambda r: "UNLIMITED",
    "Reason": lambda r: "None",
}


def text_of_job(field: Field, row: JobRow) -> str:
    """Returns what a column says of a job; empty where only actions have such a value."""
    text = _TEXTS.get(field.name)
    return "" if text is None else text(row)
