"""Moves the ends that a broker's start implies back to the last event before that start. Pure.

Between two starts of a job's broker nothing is held, because the job waits in Slurm's queue. When
the broker starts again, it ends what was open: nodes, their leases and sessions, and actions that
will not run again. Those ends bear the time of the start. For accounting they happened when the
earlier start was last heard. The scheduler does not read events through this; accounting does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..domain import event as ev

_ENDS = (ev.NodeLost, ev.LeaseFinished, ev.LeaseReleased, ev.LeaseReturned, ev.SessionClosed,
         ev.ActionCancelled)


def without_gaps(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """Yields the events in order, with such times corrected. O(1) for each event."""
    last = before = started = 0
    for event in events:
        if type(event) is ev.BrokerStarted:
            before, started = last or event.at, event.at
        elif event.at == started and isinstance(event, _ENDS):  # entailed by the start
            event = ev.moved(event, before)
        last = max(last, event.at)
        yield event
