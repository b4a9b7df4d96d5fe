"""Reads what is known of the leases that hold CPUs of one node, and of the actions behind them.
Pure.
"""

from __future__ import annotations

from .....domain.states import LeaseState
from ....state.ledger import LeaseEntry
from ....state.speed import ONE, run_ns, speed
from ...snapshot import NodeView, Snapshot


def is_elastic(resizable: bool, degrees: tuple[int, ...]) -> bool:
    """Returns whether an action may run on sizes between its degrees.

    An action whose only degree is above 1 runs on that degree alone.
    """
    return resizable and (len(degrees) > 1 or degrees == (1,))


def from_one(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the degrees without 0; on 0 units an action would never end."""
    return degrees if degrees[0] else degrees[1:]


def cpu_leases(view: Snapshot, node: NodeView) -> list[LeaseEntry]:
    """Returns the leases of a node that hold CPUs which no session reserves."""
    leases = map(view.ledger.leases.__getitem__, view.ledger.nodes[node.node].leases)
    return [lease for lease in leases if lease.key == "cpu" and not lease.reserved]


def gives_back(view: Snapshot, lease: LeaseEntry) -> bool:
    """Returns whether a lease gives back all but one of its CPUs if others want them."""
    if lease.state is LeaseState.RELEASING:  # its action may be forgotten already
        return False
    action = view.ledger.actions[lease.action].action
    return is_elastic(action.resizable, action.degrees)


def done_before(lease: LeaseEntry, serial: int, kept: tuple[int, int, int] | None = None,
                ) -> tuple[int, int, int]:
    """Returns (number of sizes, serial fraction, work in ns done before it got its present size).

    Args:
        lease: a lease that has begun.
        serial: the serial fraction of its action, in 1/1000.
        kept: what was returned for this lease the last time; None if that is not known.
    """
    n = len(lease.grants)
    if kept is not None and kept[0] == n and kept[1] == serial:
        return kept
    work = sum(speed(serial, units) * ns >> ONE for units, ns in lease.spans(lease.grants[-1][0]))
    return n, serial, work


def work_left(view: Snapshot, lease: LeaseEntry, done: tuple[int, int, int]) -> int:
    """Returns the work that is expected to be left of a lease, in ns on one unit; `done` is what
    `done_before` returned for it.
    """
    since, units = lease.grants[-1]
    so_far = done[2] + ((view.now_ns - since) * speed(done[1], units) >> ONE)
    return view.ledger.estimator.remaining(view.ledger.actions[lease.action].action, so_far)


def expected_end(view: Snapshot, lease: LeaseEntry, kept: tuple[int, int, int] | None = None,
                 ) -> int:
    """Returns when a lease of one unit or more should give back its last one, if its size stays;
    epoch ns. `kept` is as for `done_before`.
    """
    if lease.state is LeaseState.RELEASING:
        return view.now_ns
    serial = view.ledger.estimator.serial(view.ledger.actions[lease.action].action)
    left = work_left(view, lease, done_before(lease, serial, kept))
    return view.now_ns + run_ns(left, serial, lease.units)
