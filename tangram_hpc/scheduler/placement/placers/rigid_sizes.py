"""Chooses the sizes on which a CPU action may start that keeps its size until its end. Pure.

An action that can be resized may start on any size, since the next change of the load corrects it.
A size that is kept must suit the load that is coming. On few units the action is late; on many it
delays the others, and its last units add little speed.

Suppose N actions like this one share U units and no other comes. On d units each, they run in
N d / U waves, and the mean completion time is run(d) (1 + d N / U) / 2. So the best size is the one
for which run(d) (1 + d N / U) is least. N counts what runs and what waits. Where units are idle,
actions that come later find some, and a unit costs others little: the price N / U is multiplied by
the square of the share of units in use, about the chance that a newcomer finds none.

The node's free units may be fewer than that. Half of the best size is good enough, as the sum above
is flat around its least value. An action waits for that many units as long as it thereby saves more
than it has waited, and then starts on what is there. Thus it loses at most twice what it could.
"""

from __future__ import annotations

from typing import NamedTuple

from ...state.speed import ONE, run_ns, speed


class NodeLoad(NamedTuple):
    """The CPUs of one node, and who wants them.

    Attributes:
        cpus: all CPUs that are lent on the node.
        held: how many of them are lent.
        room: CPUs that are free, and those that running actions could give up.
        present: how many actions run or wait for CPUs on the node.
        waiting: how many of them wait.
        quiet_since: when an action started on the node last, in epoch ns; 0 for never.
    """

    cpus: int
    held: int
    room: int
    present: int
    waiting: int
    quiet_since: int


def best_size(degrees: tuple[int, ...], serial: int, load: NodeLoad) -> int:
    """Returns the degree with the best trade between an action's own speed and the others' delay.

    O(degrees).

    Args:
        degrees: its degrees, from 1 on, in ascending order.
        serial: its serial fraction, in 1/1000.
        load: the load of the node.
    """
    used = min(load.cpus, load.held + load.waiting)
    price, one = load.present * used * used, load.cpus ** 3
    return min(degrees, key=lambda d: ((one + d * price << 2 * ONE) // speed(serial, d), d))


def sizes_to_start(degrees: tuple[int, ...], serial: int, work_ns: int, load: NodeLoad,
                   ready_for_ns: int) -> tuple[tuple[int, ...], int]:
    """Returns the degrees on which an action may start now, and for how long that stays so, in ns;
    0 if it stays so until the load changes.

    Args:
        degrees: as for `best_size`.
        serial: as for `best_size`.
        work_ns: the work that is expected of it, ns on one unit.
        load: the load of the node.
        ready_for_ns: for how long it has waited, and no action has started on the node.
    """
    best = best_size(degrees, serial, load)
    good = tuple(d for d in degrees if d <= best <= 2 * d)
    fitting = [d for d in degrees if d <= load.room]
    if good[0] <= load.room or not fitting:
        return good, 0
    saved = run_ns(work_ns, serial, fitting[-1]) - run_ns(work_ns, serial, good[0])
    if saved > ready_for_ns:
        return good, saved - ready_for_ns
    return tuple(d for d in degrees if d <= best), 0
