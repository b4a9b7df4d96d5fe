"""Says until when the units that gather for an action may be lent to others. Pure.

Units gather for a waiting action that needs more of them than are free and that nothing may pass
any more. Until there are enough of them, nobody would use them. As in Slurm's backfill (Lifka, The
ANL/IBM SP scheduling system, JSSPP 1995), another waiting action may, if it should end before the
wide action can start.

Ends are only expected here. An action that runs for longer than expected delays the wide one until
it ends. By the later start that this makes, others would fit again, without end. So the time after
which no unit is lent is set once for each action for which units gather, and afterwards it may only
become earlier. It is no further away than the action has waited by then.
"""

from __future__ import annotations

from collections.abc import Iterable


def lent_until(before: int, submitted_at: int, lacking: int, ends: Iterable[tuple[int, int]],
               now: int) -> int:
    """Returns when the actions must end that are lent the units which gather for an action, in
    epoch ns; `now` or less if none are lent. O(n log n) for n ends.

    Args:
        before: what was returned for this action before; 0 for nothing that was later than `now`.
        submitted_at: when the action was submitted, epoch ns.
        lacking: how many more units it needs than are free or can be taken from others.
        ends: (when units should come free, how many of them) for each action that holds some.
        now: the present time, epoch ns.
    """
    latest = before or 2 * now - submitted_at
    for end, units in sorted(ends):
        lacking -= units
        if lacking <= 0:
            return min(end, latest)
    return now
