"""Says until when the units that gather for an action may be lent to others. Pure.

Units gather for a waiting action that needs more of them than are free and that nothing may pass
any more. Until there are enough of them, nobody would use them. As in Slurm's backfill (Lifka, The
ANL/IBM SP scheduling system, JSSPP 1995), another waiting action may, if it should end before the
wide action can start.

Ends are only expected here. An action that runs for longer than expected delays the wide one, and
by the later start that this makes, others would fit again, without end. So the time until which
units are lent is set when they begin to gather, and later it may only become earlier. It is no
further away than the action has waited by then, so that lending at most doubles its wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Gathering(NamedTuple):
    """For which action the units of a node gather.

    Attributes:
        action: id of the action; 0 for none.
        until: until when its units may be lent, in epoch ns.
    """

    action: int
    until: int


NOTHING = Gathering(0, 0)


def lent_until(before: Gathering, action: int, submitted_at: int, lacking: int,
               ends: Iterable[tuple[int, int]], now: int) -> Gathering:
    """Returns until when the units that gather for an action may be lent. O(n log n) for n ends.

    Args:
        before: for which action the node's units gathered before.
        action: id of the action for which they gather now.
        submitted_at: when it was submitted, epoch ns.
        lacking: how many more units it needs than are free or can be taken from others.
        ends: (when units should come free, how many of them) for each action that holds some.
        now: the present time, epoch ns.
    """
    same = before.action == action
    if same and before.until <= now:
        return before
    latest = before.until if same else 2 * now - submitted_at
    for end, units in sorted(ends):
        lacking -= units
        if lacking <= 0:
            return Gathering(action, min(end, latest))
    return Gathering(action, now)
