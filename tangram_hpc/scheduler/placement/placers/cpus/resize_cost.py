"""Says which resizes are worth what they cost on their node, and divides CPUs with those. Pure.

An action is taken to make no progress while its node applies a new size. The node's worker measures
how long it needs to bind the processes and to tell the sandbox, and the ledger keeps a mean for
each node (`NodeEntry.resize_ns`). On most nodes it is less than a millisecond, and then nothing
here changes a decision. Where it is more:

- A running action grows only if it will end sooner by GAIN times the cost. To save the
  cost alone is not enough: the work that is left is an estimate, and another resize may follow.
- A waiting action takes units from running actions only once the action that waits longest has
  waited for PATIENCE times the cost: as long as giving up the units and getting them back takes
  the other action. An end that would soon have freed units makes the resize needless, and nobody
  knows when it comes. So the wait costs at most as much as the resizes that it may save, as in
  the ski-rental problem.
"""

from __future__ import annotations

from ....state.speed import ONE, speed
from ....state.tenant_use import TenantTurns, copy_of
from .cpu_division import ResizableLease, WaitingCandidate, divide_cpus

FREE_NS = 10_000_000  # a cost below half of the least time between two resizes counts as none
# The cost and each sample of it are capped at this, so that no action waits long for it, and one
# resize that stood still for a minute is soon forgotten.
MOST_NS = 2_500_000_000
GAIN, PATIENCE = 8, 2
ROUNDS = 4  # how often the units of a node are divided while some action would gain too little


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


def ends_soon(cost: int, serial: int, left: int, units: int) -> bool:
    """Returns whether an action that holds `units` is expected to end before others could have
    taken some and it had got them back, so that they had better wait for its end. The arguments
    are those of `is_worth`.
    """
    return bool(units) and (left << ONE) // speed(serial, units) <= PATIENCE * cost


def divide_with_cost(
        free: int, cost: int, keep: bool, holders: list[tuple[ResizableLease, int, int]],
        candidates: list[WaitingCandidate], turns: TenantTurns | None,
        ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divides as `divide_cpus` does, without growth that is not worth what a resize costs.

    What an action gains is known only when its new size is. So the actions that would gain too
    little are held at their sizes, and the units are divided again. After ROUNDS divisions no
    action grows.

    Args:
        free: units that no action holds.
        cost: what a resize costs on the node, ns; with 0 all is as in `divide_cpus`.
        keep: whether no running action gives up units.
        holders: the actions whose size may change, each with its serial fraction and the ns of
            work that is left.
        candidates, turns: as for `divide_cpus`.
    """
    if not cost:
        return divide_cpus(free, [h for h, _, _ in holders], candidates, copy_of(turns))
    work = {h.id: (serial, left) for h, serial, left in holders}
    held = {h.id: h._replace(least=h.units if keep or ends_soon(cost, serial, left, h.units) else 1)
            for h, serial, left in holders}
    stay = [h.id for h, serial, left in holders
            if not is_worth(cost, serial, left, h.units, h.top)]
    for round_ in range(ROUNDS + 1):
        if round_ == ROUNDS:
            stay = [lease for lease, h in held.items() if h.units]
        for lease in stay:
            held[lease] = held[lease]._replace(top=held[lease].units)
        sizes, starts = divide_cpus(free, list(held.values()), candidates, copy_of(turns))
        stay = [lease for lease, units in sizes if units > held[lease].units
                and not is_worth(cost, *work[lease], held[lease].units, units)]
        if not stay:
            break
    return sizes, starts
