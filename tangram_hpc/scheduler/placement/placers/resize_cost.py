"""Says which resizes are worth what they cost on their node. Pure.

An action makes no progress while its node applies a new size. The node's worker measures how long
that takes, and the ledger keeps a mean for each node (`NodeEntry.resize_ns`). On most nodes it is
less than a millisecond, and then nothing here changes a decision. Where it is more:

- A running action grows only if it will end sooner by GAIN times the cost. Once is not enough: the
  work that is left is an estimate, and another resize may follow.
- A waiting action takes units from running actions only once the action that waits longest has
  waited for PATIENCE times the cost: as long as giving up the units and getting them back takes
  the other action. An end that would soon have freed units makes the resize needless, and nobody
  knows when it comes. So the wait costs at most as much as the resizes that it may save, as for a
  tenant who rents before he buys.
"""

from __future__ import annotations

from ...state.speed import ONE, speed

FREE_NS = 10_000_000  # a cost below half of the least time between two resizes counts as none
MOST_NS = 2_500_000_000  # a cost counts as this at most, so that no action waits long for it
GAIN, PATIENCE = 4, 2


def counted_cost(measured_ns: int) -> int:
    """Returns what a resize is taken to cost on a node where it took `measured_ns`, in ns."""
    return min(measured_ns, MOST_NS) if measured_ns >= FREE_NS else 0


def is_worth(cost: int, serial: int, left: int, units: int, more: int) -> bool:
    """Returns whether an action ends enough sooner on `more` units than on `units`.

    Args:
        cost: what a resize costs, ns.
        serial: the action's serial fraction, in 1/1000.
        left: the work that is left, ns on one unit.
        units: the units that it holds; an action without any always gets some.
        more: the units that it may get.
    """
    if not cost or not units:
        return True
    return (left << ONE) // speed(serial, units) - (left << ONE) // speed(serial, more) >= (
        GAIN * cost)
