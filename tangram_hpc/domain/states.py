"""Pure. The states of actions, leases, sessions and nodes, in Slurm's words where Slurm has one.

Which move is legal is `scheduler/state/transitions.py`; this file only names the states.
"""

from __future__ import annotations

from enum import Enum


class ActionState(str, Enum):
    """An action's life; it ends when its result is known."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"


class LeaseState(str, Enum):
    """The life of a lease. It ends when its node reports that nothing of the attempt is left."""

    GRANTED = "GRANTED"
    ACTIVE = "ACTIVE"
    RELEASING = "RELEASING"
    RELEASED = "RELEASED"


class SessionState(str, Enum):
    """A session's life: WAITING for admission, then a sandbox on its home node. MOVING: its files
    leave that node, and it waits for another."""

    WAITING = "WAITING"
    OPENING = "OPENING"
    IDLE = "IDLE"
    BUSY = "BUSY"
    MOVING = "MOVING"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"
    LOST = "LOST"


class NodeState(str, Enum):
    """A node's life; a rejoin is a new epoch."""

    UP = "UP"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    DOWN = "DOWN"


class AllocState(str, Enum):
    """An allocation's life: decided upon, in Slurm's queue, granted, to end, gone."""

    ASKED = "ASKED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    ENDING = "ENDING"
    ENDED = "ENDED"


ENDED = frozenset(
    {
        ActionState.COMPLETED,
        ActionState.FAILED,
        ActionState.TIMEOUT,
        ActionState.OUT_OF_MEMORY,
        ActionState.CANCELLED,
        ActionState.NODE_FAIL,
        ActionState.PREEMPTED,
    }
)
