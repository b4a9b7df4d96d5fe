"""Folds a job's events into one row about the job itself, as sacct has one above its steps. Pure.

Slurm's own accounting knows nothing of actions, and tools that read sacct's output take the figures
of the job from its row and those of actions from the rows below it. The fold takes one pass,
O(events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..domain import event as ev
from ..domain.node import NodeSpec
from ..domain.slurm import JobSpan
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
        state: RUNNING, COMPLETED when its broker has ended in order, else FAILED.
        reason: why its broker ended; empty while it runs.
        start_ns: when Slurm granted it; where that is not known, when its broker first began.
        end_ns: when Slurm ended it; where that is not known, when its broker ended, or of one that
            was killed, the last event.
        nodes: names of the nodes that it lent.
        partitions: the components of these nodes.
        cpus, mem_mib, gpus: what the nodes lent that it had at one time, at most; MiB.
        held_ns: core-ns that its nodes were held.
        cpu_ns: CPU time that the processes of its actions used.
        account: the Slurm account that it is charged to; empty for none.
    """

    job: str
    user: str
    state: str
    reason: str
    start_ns: int
    end_ns: int
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]
    cpus: int
    mem_mib: int
    gpus: int
    held_ns: int
    cpu_ns: int
    account: str = ""


class JobFold:
    """Folds events into the records of actions, and into the row of their job. Events must come in
    order, by way of `without_gaps`.

    Args:
        spans: when the job held nodes, by Slurm's accounting; empty where that is not known.

    Attributes:
        records: the fold of the actions.
        allocations: the fold of what was held.
    """

    def __init__(self, spans: Sequence[JobSpan] = ()) -> None:
        self.records = Fold()
        self.allocations, self._nodes, self._spans = HeldUsage(spans), _Nodes(), spans
        self._user, self._account, self._began = "", "", 0
        self._ended: str | None = None  # why the broker ended, if its journal says so

    def add(self, event: ev.Event) -> None:
        """Takes one event."""
        self.records.add(event)
        self.allocations.add(event)
        match event:
            case ev.NodeJoined() | ev.NodeLost():
                self._nodes.add(event)
            case ev.BrokerStarted():
                self._user, self._account, self._ended = event.user, event.account, None
                self._began = self._began or event.granted_at or event.at
            case ev.BrokerStopped():
                self._ended = event.reason

    def close(self, served: bool, now_ns: int) -> JobRow:
        """Ends the fold, and returns the row of the job.

        Args:
            served: whether a broker serves the job now; the journal of one that was killed has no
                end.
            now_ns: the present time.
        """
        fold = self.records
        fold.close(served)
        self.allocations.close()
        held_ns, _ = total(self.allocations.rows.values())
        state, reason, end_ns = "COMPLETED", self._ended or "", fold.last_ns
        if self._ended is None:
            state, reason, end_ns = (("RUNNING", "", max(now_ns, fold.last_ns)) if served else
                                     ("FAILED", "its broker was killed", fold.last_ns))
        leads = [span for span in self._spans if span.job in (fold.job, f"{fold.job}+0")]
        end_ns = max([end_ns, *(span.end_ns for span in leads)])
        cpus, mem_mib, gpus = self._nodes.most
        return JobRow(
            fold.job, self._user, state, reason, self._began, end_ns, self._nodes.names,
            self._nodes.partitions, cpus, mem_mib, gpus, held_ns, fold.usage.burnt_ns,
            self._account)


def fold_with_job(events: Iterable[ev.Event], served: bool, now_ns: int,
                  spans: Sequence[JobSpan] = ()) -> tuple[Fold, JobRow]:
    """Returns the fold of all events, and the row of their job; see `JobFold`."""
    job = JobFold(spans)
    for event in without_gaps(events):
        job.add(event)
    row = job.close(served, now_ns)
    return job.records, row


class _Nodes:
    """The nodes of a job.

    Attributes:
        most: CPUs, MiB and GPUs that were lent at one time, at most; each may be of another time.
    """

    def __init__(self) -> None:
        self._ever: dict[int, NodeSpec] = {}
        self._up: dict[int, NodeSpec] = {}
        self.most = (0, 0, 0)

    def add(self, event: ev.Event) -> None:
        """Takes one event."""
        if isinstance(event, ev.NodeLost):
            self._up.pop(event.node, None)
        elif isinstance(event, ev.NodeJoined):
            self._ever[event.node] = self._up[event.node] = event.spec
            up = self._up.values()
            cpus, mem_mib, gpus = self.most
            self.most = (max(cpus, sum(len(spec.cores) for spec in up)),
                         max(mem_mib, sum(spec.mem_mib for spec in up)),
                         max(gpus, sum(len(spec.gpus) for spec in up)))

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all nodes that ever joined, each once."""
        return tuple(dict.fromkeys(spec.name for spec in self._ever.values()))

    @property
    def partitions(self) -> tuple[str, ...]:
        """Returns the components of these nodes, each once."""
        return tuple(dict.fromkeys(s.component for s in self._ever.values() if s.component))


def _tres(row: JobRow) -> str:
    return f"cpu={row.cpus},mem={row.mem_mib}M,node={len(row.nodes)}" + (
        f",gres/gpu={row.gpus}" if row.gpus else "")


_TEXTS: dict[str, Callable[[JobRow], str]] = {
    "JobID": lambda r: r.job,
    "JobIDRaw": lambda r: r.job,
    "User": lambda r: r.user,
    "Account": lambda r: r.account,
    "Partition": lambda r: ",".join(r.partitions),
    "NodeList": lambda r: ",".join(r.nodes) or "None assigned",
    "NNodes": lambda r: str(len(r.nodes)),
    "State": lambda r: r.state,
    "ExitCode": lambda r: "1:0" if r.state == "FAILED" else "0:0",
    "Submit": lambda r: stamp(r.start_ns),
    "Start": lambda r: stamp(r.start_ns),
    "End": lambda r: "Unknown" if r.state == "RUNNING" else stamp(r.end_ns),
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
    "Reason": lambda r: r.reason or "None",
}


def text_of_job(field: Field, row: JobRow) -> str:
    """Returns what a column says of a job; empty where only actions have such a value."""
    text = _TEXTS.get(field.name)
    return "" if text is None else text(row)
