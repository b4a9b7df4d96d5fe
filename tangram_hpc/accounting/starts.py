"""Pure. Between two starts of a job's broker nothing is held: the job waits in Slurm's queue.

Law: only times are changed, and only those of what a start says had ended before it (its nodes,
their leases and sessions, what was never to run again): that ended with the last word of the start
before. Accounting reads events through this; the scheduler does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..domain import event as ev

_ENDS = (ev.NodeLost, ev.LeaseFinished, ev.LeaseReleased, ev.LeaseReturned, ev.SessionClosed,
         ev.ActionCancelled)


def without_gaps(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """The events, each in its turn. O(1) an event."""
    last = before = started = 0
    for event in events:
        if type(event) is ev.BrokerStarted:
            before, started = last or event.at, event.at
        elif event.at == started and isinstance(event, _ENDS):  # entailed by the start
            event = ev.moved(event, before)
        last = max(last, event.at)
        yield event
