"""Submits, watches and ends satellites: the Slurm jobs that the broker itself asks for.

The scheduler decides; this module carries the decisions out, through the Slurm port and through
workers. A satellite whose worker was told to end ends by itself, without a call to Slurm. A
satellite that still waits in the queue, a het component, and a satellite that does not end are
cancelled. Slurm is asked only while a request waits, or while the start or the end of a satellite
is not known. Every answer becomes an event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..domain import decision as de
from ..domain import event as ev
from ..domain.allocation import SatelliteShape
from ..domain.slurm import JobOrder, JobRef, JobView
from ..domain.states import AllocState
from ..ports import Clock, Slurm, SlurmRejected, SlurmTransient, Timer
from ..scheduler.autoscale.backoff import backoff_until, refused
from ..scheduler.state.alloc_ledger import AllocEntry
from ..scheduler.state.ledger import Ledger

LINGER_NS = 45 * 10**9  # a satellite is cancelled this long after its workers were told to end
_RETRY_NS = 10**9
# Parts of the Reason that Slurm gives for a job that does not start when other jobs end: what the
# job itself asks for exceeds a limit, a budget is used up, or somebody must change something. A
# limit of what runs at one time (QOSMaxJobsPerUserLimit, AssocGrpCpuLimit) is none of these.
_HOPELESS = re.compile(
    "PerJob|PerNode|MaxMemPerLimit|QOSMin|TimeLimit|PartitionNodeLimit|WallLimit|(?<!Run)Minutes|"
    "BadConstraints|InvalidAccount|InvalidQOS|PartitionDown|PartitionInactive|AccountNotAllowed|"
    "QOSNotAllowed|JobHeld|"
    # in words, of an account or a QOS, and of a node where the site's prolog failed
    "not.permitted.to.use.this.partition|requeued.held")


@dataclass
class SatelliteScripts:
    """The scripts and settings with which satellites are submitted.

    Attributes:
        scripts: the batch script for each shape's name.
        environ: the environment of the satellites.
        output: the file that they print to, as for sbatch's `--output`; empty for Slurm's default.
    """

    scripts: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    output: str = ""


def job_name(job: str, alloc: int) -> str:
    """The Slurm job name of a satellite, by which it is found if it is not known whether Slurm took
    it.
    """
    return f"tangram-{job}-s{alloc}"


def job_order(job: str, alloc: int, shape: SatelliteShape, scripts: SatelliteScripts) -> JobOrder:
    """The job that is submitted for a satellite. Slurm never requeues it: the scheduler decides
    whether another one is needed.
    """
    seconds = shape.time_ns // 10**9
    options = {
        "job-name": job_name(job, alloc), "no-requeue": "", "nodes": str(shape.nodes),
        "cpus-per-task": str(shape.cpus), "time": f"{seconds // 60}:{seconds % 60:02d}"}
    wished = {"partition": shape.partition, "qos": shape.qos, "account": shape.account,
              "mem": f"{shape.mem_mib}M" if shape.mem_mib else "", "gres": gres(shape),
              "output": scripts.output}
    options |= {name: value for name, value in wished.items() if value}
    return JobOrder(scripts.scripts[shape.name], tuple(options.items()),
                    tuple(scripts.environ.items()))


def gres(shape: SatelliteShape) -> str:
    """Slurm's `gres` for the GPUs of a shape; empty for none."""
    return shape.gres or (f"gpu:{shape.gpus}" if shape.gpus else "")


class Satellites:
    """Carries out one broker's orders about allocations and turns Slurm's answers into events.

    Attributes:
        reasons: for each request that waits, Slurm's reason, or its state if it gives none.
        troubles: why the last call to Slurm failed; empty if it did not.
        cancelling: whether the satellites that still waited when the broker ended are being
            cancelled.
    """

    def __init__(self, job: str, slurm: Slurm | None, scripts: SatelliteScripts, ledger: Ledger,
                 clock: Clock, timer: Timer, record_event: Callable[[ev.Event], None],
                 end_worker: Callable[[int, str], None]) -> None:
        self._job, self._slurm, self._scripts, self._ledger = job, slurm, scripts, ledger
        self._now, self._timer = clock.now_ns, timer
        self._record_event, self._end_worker = record_event, end_worker
        self._retry_at: dict[int, int] = {}  # when to repeat requests that could not be made
        self._unsure: set[int] = set()  # requests that may have been made; looked for by name
        self._flying: set[int] = set()  # requests that Slurm has not answered yet
        self._settled: set[int] = set()  # satellites whose start is known
        self._ending: dict[int, int] = {}  # when the workers of these satellites were told to end
        self._cancelled: set[int] = set()
        self._earlier: set[int] = set()  # made and perhaps cancelled by an earlier broker
        self._asking = False
        self._ended = False
        self.reasons: dict[int, str] = {}  # Slurm's word for why a request waits
        self.troubles = ""  # why the last call to Slurm failed
        self.cancelling = False  # whether waiting satellites are being cancelled

    def start(self) -> None:
        """Takes over the satellites of an earlier broker; requests without a job id may have
        reached Slurm or not, and are looked for by name.
        """
        for entry in self._ledger.allocs.satellites():
            self._earlier.add(entry.alloc)
            if not entry.job:
                self._unsure.add(entry.alloc)

    def stop(self) -> None:
        """Cancels the satellites that still wait in Slurm's queue, because the broker ends.
        Satellites that run end with their workers.
        """
        self._ended = True
        waits = [_ref(e.job) for e in self._ledger.allocs.satellites() if e.job and not e.nodes]
        if waits and self._slurm is not None:
            self.cancelling = True
            self._slurm.cancel(waits, self._last_told)

    def _last_told(self, failed: SlurmRejected | SlurmTransient | None) -> None:
        self.cancelling = False

    # ---- orders --------------------------------------------------------------------------------

    def ask(self, order: de.AskAllocation) -> None:
        """Submits a satellite, or refuses the request if this broker has no Slurm or no such shape.
        """
        shape = order.shape
        if self._slurm is None or shape.name not in self._scripts.scripts:
            why = "this broker is in no Slurm job" if self._slurm is None else "no such shape"
            self._timer.after(0, lambda: self._refuse(order.alloc, why))
            return
        self._flying.add(order.alloc)
        self._earlier.discard(order.alloc)
        made = job_order(self._job, order.alloc, shape, self._scripts)
        self._slurm.submit(made, lambda told: self._submitted(order.alloc, told))

    def end(self, order: de.EndAllocation) -> None:
        """Ends the workers of an allocation, or cancels an allocation without workers."""
        for node in order.nodes:
            self._end_worker(node, order.reason)
        self._ending[order.alloc] = self._now()
        if not order.job:
            if order.alloc not in self._flying and order.alloc not in self._unsure:
                self._retry_at.pop(order.alloc, None)
                self._timer.after(0, lambda: self._gone(order.alloc, ""))
        elif not order.nodes or "+" in order.job:
            self._cancel([order.alloc])

    # ---- Slurm's answers -------------------------------------------------------------------------

    def _submitted(self, alloc: int, told: int | SlurmRejected | SlurmTransient) -> None:
        self._flying.discard(alloc)
        if self._ended:
            return
        if isinstance(told, int):
            self._record_event(ev.AllocationQueued(self._now(), alloc, str(told)))
        elif isinstance(told, SlurmRejected):
            self._refuse(alloc, str(told))
        else:
            self.troubles = str(told)
            if told.unsure:
                self._unsure.add(alloc)
            else:
                self._retry_at[alloc] = max(told.again_ns, self._now() + _RETRY_NS)

    def _refuse(self, alloc: int, why: str) -> None:
        for fact in refused(self._ledger, alloc, why, self._now()):
            self._record_event(fact)

    def _cancel(self, allocs: list[int]) -> None:
        jobs = [_ref(e.job) for a in allocs if (e := self._ledger.allocs.entries.get(a)) is not None
                and e.job]
        if jobs and self._slurm is not None:
            self._cancelled |= set(allocs)
            self._slurm.cancel(jobs, lambda failed: self._cancel_told(allocs, failed))

    def _cancel_told(self, allocs: list[int],
                     failed: SlurmRejected | SlurmTransient | None) -> None:
        if failed is not None:
            self.troubles = str(failed)
            if isinstance(failed, SlurmTransient):
                self._cancelled -= set(allocs)  # cancelled again at the next check
            return
        for alloc in allocs:  # a query sees the end of a job; a component is gone now
            entry = self._ledger.allocs.entries.get(alloc)
            if entry is not None and "+" in entry.job:
                self._gone(alloc, "")

    def _gone(self, alloc: int, why: str, ended: int = 0) -> None:
        for of in (self._settled, self._cancelled, self._unsure, self._earlier):
            of.discard(alloc)
        self._ending.pop(alloc, None)
        self.reasons.pop(alloc, None)
        if alloc in self._ledger.allocs.entries and not self._ended:
            self._record_event(ev.AllocationEnded(self._now(), alloc, why, ended))

    def stalled(self, stalled_ns: int) -> None:
        """Adds time in which the broker did not run to the deadlines of workers that were told to
        end.
        """
        self._ending = {alloc: told + stalled_ns for alloc, told in self._ending.items()}

    # ---- checks --------------------------------------------------------------------------------

    def watch(self) -> None:
        """Repeats requests that could not be made, and asks Slurm about unsettled satellites. It is
        called every few seconds.
        """
        if self._slurm is None or self._ended:
            return
        now, entries = self._now(), self._ledger.allocs.entries
        self._watch_others()
        for alloc, at in list(self._retry_at.items()):
            if now >= at:
                del self._retry_at[alloc]
                entry = entries.get(alloc)
                if entry is not None and entry.state is AllocState.ENDING:
                    self._gone(alloc, "")  # the request was withdrawn meanwhile
                elif entry is not None and entry.shape is not None:
                    self.ask(de.AskAllocation(alloc, entry.shape))
        jobs = {e.alloc: e.job for e in self._ledger.allocs.satellites()
                if e.job and self._unsettled(e)}
        names = {alloc: job_name(self._job, alloc) for alloc in self._unsure if alloc in entries}
        if (jobs or names) and not self._asking:
            self._asking = True
            self._slurm.query([int(job) for job in jobs.values()],
                              lambda told: self._seen(jobs, names, told), tuple(names.values()))

    def _watch_others(self) -> None:
        """Ends allocations that the broker gave back although it had not requested them itself."""
        for entry in list(self._ledger.allocs.entries.values()):
            if entry.shape is None and entry.state is AllocState.ENDING:
                if "+" in entry.job and entry.alloc not in self._cancelled:
                    self._cancel([entry.alloc])
                elif "+" not in entry.job and not entry.nodes:
                    self._gone(entry.alloc, "")

    def _unsettled(self, entry: AllocEntry) -> bool:
        runs = entry.state is AllocState.RUNNING and bool(entry.nodes)
        return not runs or entry.alloc not in self._settled

    def _seen(self, jobs: dict[int, str], names: dict[int, str],
              told: tuple[JobView, ...] | SlurmRejected | SlurmTransient) -> None:
        self._asking = False
        if self._ended:
            return
        if not isinstance(told, tuple):
            self.troubles = str(told)
            return
        self.troubles = ""
        by_job = {str(row.job): row for row in told}
        by_name = {row.name: row for row in told}
        for alloc, name in names.items():
            self._unsure.discard(alloc)
            if name in by_name:
                self._record_event(ev.AllocationQueued(self._now(), alloc, str(by_name[name].job)))
            else:
                self._retry_at[alloc] = self._now()
        late = []
        for alloc, job in jobs.items():
            entry = self._ledger.allocs.entries.get(alloc)
            if entry is not None:
                self._learn(entry, by_job.get(job))
                if self._lingers(entry):
                    late.append(alloc)
        self._cancel(late)

    def _lingers(self, entry: AllocEntry) -> bool:
        told = self._ending.setdefault(entry.alloc, self._now()) if (
            entry.state is AllocState.ENDING) else self._now()
        return self._now() - told > LINGER_NS and entry.alloc not in self._cancelled

    def _learn(self, entry: AllocEntry, row: JobView | None) -> None:
        now, alloc = self._now(), entry.alloc
        if row is None or row.over:
            return self._learn_end(entry, row)
        if row.waits or row.prepares:
            self.reasons[alloc] = row.reason or row.state
            if entry.state is AllocState.PENDING and _HOPELESS.search(row.reason):
                assert entry.shape is not None
                until = backoff_until(self._ledger, entry.shape.name, now)
                why = f"Slurm holds it back: {row.reason}"
                self._record_event(ev.AllocationReleased(now, alloc, why, until))
            return
        self.reasons.pop(alloc, None)
        if alloc not in self._settled and entry.state is not AllocState.ENDING:
            self._settled.add(alloc)
            self._record_event(ev.AllocationHeld(now, alloc, row.start_ns))

    def _learn_end(self, entry: AllocEntry, row: JobView | None) -> None:
        state = f"{row.state} {row.reason}".strip() if row is not None else "Slurm has it no more"
        started = row.start_ns if row is not None and row.end_ns > row.start_ns else 0
        if started and entry.alloc not in self._settled:
            self._record_event(ev.AllocationHeld(self._now(), entry.alloc, started))
        if entry.state is not AllocState.ENDING and not entry.joined and (
                entry.alloc not in self._earlier):
            self._refuse(entry.alloc, f"its job {entry.job} ended before a worker joined: {state}")
        why = "" if entry.state is AllocState.ENDING else state
        self._gone(entry.alloc, why, row.end_ns if row is not None else 0)


def _ref(job: str) -> JobRef:
    """Parses the name of a job (`123`) or of a het component (`123+1`)."""
    number, _, component = job.partition("+")
    return JobRef(int(number), int(component) if component else -1)
