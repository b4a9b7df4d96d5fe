"""Counts the actions that ended lately, for the rates and times that `tangram top` shows. Pure.

Idea: a ring of counters, one for each 5 s of the last 15 min. Noting an end costs O(1), and memory
does not grow. The counters are no part of the ledger: a broker that starts again begins with none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ...domain.decision import ReplyToClient
from ...domain.states import ActionState

SLOT_NS = 5 * 10**9
WINDOWS_S = (5, 60, 300, 900)


@dataclass(slots=True)
class _Slot:
    number: int
    ended: int = 0
    failed: int = 0
    wait_ns: int = 0
    held_ns: int = 0


class RecentActions:
    """The ends of actions in the last 15 minutes."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=max(WINDOWS_S) * 10**9 // SLOT_NS + 1)
        self._last = _Slot(-1)  # the slot of the last action, which is over at `_until`
        self._until = 0

    def note(self, reply: ReplyToClient, now: int) -> None:
        """Counts an action that ended at `now`, in epoch ns."""
        if now >= self._until:
            self._last = _Slot(now // SLOT_NS)
            self._until = (self._last.number + 1) * SLOT_NS
            self._slots.append(self._last)
        slot = self._last
        slot.ended += 1
        if reply.outcome.state is not ActionState.COMPLETED:
            slot.failed += 1
        slot.wait_ns += reply.queue_ns
        slot.held_ns += reply.held_ns

    def view(self, now: int) -> list[dict[str, Any]]:
        """Returns, for each window of time, how many actions ended a second, how many of them did
        not complete, and their mean ACT with its two parts, in s; None where none ended.

        A window is made of whole slots that are over, so that a slot which has just begun does not
        lower its rate. The first window is the last slot.
        """
        last, views = now // SLOT_NS - 1, []
        for window_s in WINDOWS_S:
            first = last - window_s * 10**9 // SLOT_NS + 1
            slots = [s for s in self._slots if first <= s.number <= last]
            ended = sum(s.ended for s in slots)
            wait, held = sum(s.wait_ns for s in slots), sum(s.held_ns for s in slots)
            views.append({
                "window_s": window_s, "ended": ended, "failed": sum(s.failed for s in slots),
                "rate": ended / window_s,
                "act_s": (wait + held) / ended / 1e9 if ended else None,
                "wait_s": wait / ended / 1e9 if ended else None,
                "held_s": held / ended / 1e9 if ended else None})
        return views
