"""Splits the ACT of an action into what it was spent on. Pure.

The parts are the wait for units, the restore (bringing a service onto its GPUs), the set-up on the
node, the run, and the return. They always add up to the ACT. What the node measured by its own
clock is taken as it is; the wait, which the broker's clock measured, gives way where both count the
same time. That happens to prefetched actions, which their node begins before the broker hears that
the action in front has ended, and to calls that wait for their batch.

The return is the rest. It is mostly the way of the result back to the broker. The way of the order
to the node counts here too, since no clock sees both of its ends.
"""

from __future__ import annotations

from typing import NamedTuple


class ActParts(NamedTuple):
    """The parts of an ACT, in ns.

    Attributes:
        wait_ns: until units were lent to it.
        restore_ns: bringing its service onto the GPUs.
        setup_ns: from the order to the node until it ran: it waited for a sandbox or its payload.
        run_ns: run time on the node.
        return_ns: carrying the order and the result, and handling both; where nobody measured the
            set-up, that too.
    """

    wait_ns: int
    restore_ns: int
    setup_ns: int
    run_ns: int
    return_ns: int


def act_parts(act_ns: int, planned_ns: int, restore_ns: int, setup_ns: int, run_ns: int
              ) -> ActParts:
    """Returns the parts of an ACT.

    Args:
        act_ns: time from submission to result.
        planned_ns: time from submission to the last grant.
        restore_ns, run_ns: what the node measured.
        setup_ns: the same; -1 if nobody measured it.
    """
    left = act_ns - (run := min(run_ns, act_ns))
    left -= (restore := min(restore_ns, left))
    left -= (setup := min(max(0, setup_ns), left))
    wait = min(planned_ns, left)
    return ActParts(wait, restore, setup, run, left - wait)
