"""Pure. How many plain actions of a client are at the broker, and which ones wait at the client.

Problem. A program may submit a million actions at once. If the broker had all of them, its memory
and the time of a checkpoint would grow with them, and other clients would wait for that.

Idea: credit. The broker says how many plain actions of this client it takes (`Welcome.credit`,
renewed by each `Pong`). The others are held back here, in order, and each end of an action lets the
next one go. The credit is many times what the nodes can run, so units idle for it only while the
client is away for longer than the actions at the broker last.

Only plain single actions are held back: those that ask for one CPU and nothing else, and that are
outside of sessions and trajectories. They are alike for placement, so nothing that could start
elsewhere waits behind one of them; only where some nodes cannot isolate untrusted commands can a
function wait behind such commands. Everything else leaves at once, and work with an idempotency key
is always at the broker, where it outlives its client.

An action that is held back leaves at once, beyond the credit, when input follows for it, so the
broker knows it when that arrives. One that is cancelled ends here; the broker never hears of it.
"""

from __future__ import annotations

from ..domain.action import Action
from .results import Pending


def counts(action: Action) -> bool:
    """Whether an action is a plain single one, which may be held back."""
    return action.key == "cpu" and action.degrees == (1,) and not (
        action.session or action.gpus or action.mem_mib or action.component or action.trajectory
        or action.once)


class SubmissionCredit:
    """The plain single actions of one client that are at the broker or held back.

    `ended` is called by the connection's own thread; all else needs the connection's lock.
    """

    __slots__ = ("_credit", "_ended", "_held", "_sent")

    def __init__(self) -> None:
        self._credit = 0  # how many may be at the broker; 0: any number
        self._sent = self._ended = 0  # in all; two counters, as different threads change them
        self._held: dict[int, Pending] = {}  # by action id, oldest first

    def allow(self, credit: int) -> None:
        """Sets how many may be at the broker; 0, which an earlier broker says: any number."""
        self._credit = credit

    def admit(self, pending: Pending) -> bool:
        """Returns whether an action may be sent now; if not, holds it back."""
        if not counts(pending.action):
            return True
        pending.counted = True
        if self._credit and (self._held or self._sent - self._ended >= self._credit):
            self._held[pending.action.id] = pending
            return False
        self._sent += 1
        return True

    def ended(self, pending: Pending) -> None:
        """Counts the end of an action that was sent."""
        if pending.counted:
            self._ended += 1

    def holds(self, action: int) -> bool:
        """Returns whether an action is held back."""
        return action in self._held

    def withdraw(self, action: int) -> bool:
        """Forgets an action that is never to be sent; returns whether it was held back."""
        return self._held.pop(action, None) is not None

    def release(self, action: int) -> bool:
        """Lets one action go now, whatever the credit is; returns whether it was held back."""
        if self._held.pop(action, None) is None:
            return False
        self._sent += 1
        return True

    def take_due(self) -> list[Pending]:
        """Returns the actions that may be sent by now and are held back no more."""
        if not self._held:
            return []
        room = self._credit - (self._sent - self._ended) if self._credit else len(self._held)
        due = [pending for pending, _ in zip(self._held.values(), range(room), strict=False)]
        for pending in due:
            del self._held[pending.action.id]
        self._sent += len(due)
        return due
