"""Turns the scheduler's events into records of attempts; both kinds of simulation use it."""

from __future__ import annotations

from ..domain import event as ev
from ..scheduler.state.ledger import Ledger
from .run_records import Record
from .workload_client import WorkloadClient


class Log:
    """Collects records. It takes each event before the ledger does."""

    def __init__(self, client: WorkloadClient, ledger: Ledger) -> None:
        self._client, self._ledger = client, ledger
        self._open: dict[int, Record] = {}  # by lease
        self.records: list[Record] = []

    def note(self, event: ev.Event) -> None:
        """Takes one event."""
        if isinstance(event, ev.LeaseGranted):
            s = self._client.submission(event.action)
            node = self._ledger.nodes[event.node].spec.name
            units = 1 if s.work.resource.startswith("endpoint:") else len(
                event.gpus or event.cores)
            self._open[event.lease] = Record(
                (s.state.index, s.turn, s.index, s.attempt + event.attempt - 1),
                s.state.spec.trajectory, s.work, s.ready, event.at, node,
                [(event.at, units, event.cores)], event.gpus, event.restore_ns)
            if s.session and s.state.moved:
                s.state.moved, self._open[event.lease].migrated = False, True
        elif isinstance(event, ev.LeaseResized):
            self._open[event.lease].grants.append((event.at, len(event.cores), event.cores))
        elif isinstance(event, ev.LeaseFinished):
            record = self._open.pop(event.lease)
            record.end, record.state = event.at, event.outcome.state.value
            self.records.append(record)

    def ordered(self) -> list[Record]:
        """The records of all attempts that have ended, in the order of the workload."""
        return sorted(self.records, key=lambda r: r.order)
