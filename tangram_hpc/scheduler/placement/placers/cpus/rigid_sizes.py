"""Chooses the sizes on which a CPU action may start that keeps its size until its end. Pure.

An action that can be resized may start on any size, since the next change of the load corrects it.
A size that is kept must suit the load that is coming. On few units the action is late; on many it
delays the others, and its last units add little speed.

Suppose N actions like this one share U units and no other comes. On d units each, they run in
N d / U waves, and the mean completion time is run(d) (1 + d N / U) / 2. So the best size is the one
for which run(d) (1 + d N / U) is least. N counts what runs and what waits. Where units are idle,
actions that come later find some, and a unit costs others little: the price N / U is multiplied by
the square of the share of units in use, about the chance that a newcomer finds none. It is at least
1 / (4 U), as if another action came now and then. So an action leaves others the units of an idle
node that would add little to its speed.

The node's free units may be fewer than that. Half of the best size is good enough where it costs
little more, as it does under load. On an idle node it costs nearly twice as much if the work
divides well; there, two equal actions run one after the other on the whole node, as both on a half
would end when the second does so. An action waits for a good size no longer than the time that it
saves, and no longer than any action may be overtaken. Then it starts on what it gets.

Where several tenants use the node, a tenant's actions also have the size that they would have on a
node that is only the tenant's part and has no load but theirs. Otherwise the crowd of another
tenant would make them narrow although their own part is free. Half of the best size is always good
enough there, since the units for which an action waits are those of other tenants as well.
"""

from __future__ import annotations

from typing import NamedTuple

from ....state.speed import ONE, run_ns, speed
from ..waiting import OVERDUE_NS

NUM, DEN = 3, 2  # half of the best size is good enough if it costs at most NUM/DEN times as much


class NodeLoad(NamedTuple):
    """The CPUs of one node, and who wants them.

    Attributes:
        cpus: how many CPUs the node offers.
        free: how many of them no lease and no session holds.
        present: how many actions run or wait for CPUs on the node.
        waiting: how many of them wait.
    """

    cpus: int
    free: int
    present: int
    waiting: int


def good_sizes(degrees: tuple[int, ...], serial: int, load: NodeLoad) -> tuple[int, ...]:
    """Returns the degrees that are good enough, in ascending order. The last one is the best trade
    between an action's own speed and the others' delay. The others are at least half of it, and
    cost at most NUM/DEN times as much.

    O(degrees).

    Args:
        degrees: its degrees, from 1 on, in ascending order.
        serial: its serial fraction, in 1/1000.
        load: the load of the node.
    """
    used = min(load.cpus, load.cpus - load.free + load.waiting)
    price, one = max(4 * load.present * used * used, load.cpus ** 2), 4 * load.cpus ** 3
    costs = [((one + d * price << 2 * ONE) // speed(serial, d), d) for d in degrees]
    least, best = min(costs)
    return tuple(d for cost, d in costs if d <= best <= 2 * d and NUM * least >= DEN * cost)


def sizes_to_start(degrees: tuple[int, ...], serial: int, work_ns: int, load: NodeLoad,
                   waited_ns: int, own: NodeLoad | None = None) -> tuple[tuple[int, ...], int]:
    """Returns the degrees on which an action may start now, and for how long that stays so, in ns;
    0 if it stays so until the load changes. O(degrees).

    Args:
        degrees: as for `good_sizes`.
        serial: as for `good_sizes`.
        work_ns: the work that is expected of it, ns on one unit.
        load: the load of the node.
        waited_ns: how long it has waited.
        own: the load of its tenant on the tenant's part of the node, if several tenants use it.
    """
    good = good_sizes(degrees, serial, load)
    if own is not None:
        if possible := tuple(d for d in degrees if d <= own.free):
            good = max(good, good_sizes(possible, serial, own), key=lambda sizes: sizes[-1])
        good = tuple(d for d in degrees if d in good or d <= good[-1] <= 2 * d)
    if good[0] <= load.free:
        return good, 0
    else_on = max((d for d in degrees if d <= load.free), default=degrees[0])
    saved = run_ns(work_ns, serial, else_on) - run_ns(work_ns, serial, good[0])
    left = min(saved, OVERDUE_NS) - waited_ns
    return (good, left) if left > 0 else (tuple(d for d in degrees if d <= good[-1]), 0)
