"""Corrects the times of events where a broker was started again: accounting reads them in order.
Pure.

Between two starts of a job's broker nothing is held, because the job waits in Slurm's queue. When
the broker starts again, it ends everything that was open: nodes, their leases and sessions, and
actions that will not run again. The journal has these ends with the time of the new start.
Accounting counts them at the time of the earlier start's last event. A broker that waits for the
workers of the one before it ends nothing: they held their nodes all the time.

A broker's clock never runs backwards, but that of a later start may be behind: it was set back, or
it is the clock of another node. Then the times of that start are moved forward, so that it begins
at the last event before it. Otherwise an action that spans both starts would have a negative ACT.

Only accounting reads events through this module; the scheduler does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..domain import event as ev

_ENDS = (ev.NodeLost, ev.LeaseFinished, ev.LeaseReleased, ev.LeaseReturned, ev.SessionClosed,
         ev.ActionCancelled)


def without_gaps(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """Yields the events in order, with the corrected times. O(1) for each event."""
    last = before = started = behind = 0
    for event in events:
        if type(event) is ev.BrokerStarted:
            behind = max(0, last - event.at)
        if behind:
            event = ev.moved(event, event.at + behind)
        if type(event) is ev.BrokerStarted and not event.await_until:
            before, started = last or event.at, event.at
        elif event.at == started and isinstance(event, _ENDS):  # an end that the start entails
            event = ev.moved(event, before)
        last = max(last, event.at)
        yield event
