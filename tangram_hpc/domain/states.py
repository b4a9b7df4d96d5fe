"""Names the states of actions, leases, sessions, nodes and allocations. Pure.

Where Slurm has a word for a state, it is Slurm's word. Which changes of state are legal is written
in `scheduler/state/transitions.py`.
"""

from __future__ import annotations

from enum import Enum


class FixedWord(str, Enum):
    """One of a fixed set of words, which it is in messages, journals and checkpoints."""

    def __reduce_ex__(self, protocol: object) -> tuple[type[FixedWord], tuple[str]]:
        # Python 3.11.0 to 3.11.3 would name `getattr` instead, which no checkpoint may call
        return type(self), (self.value,)


class ActionState(FixedWord):
    """The states of an action, which ends when its result is known."""

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


# neither a person nor a limit nor the loss of a node ended such an action
ENDED_BY_ITSELF = (ActionState.COMPLETED, ActionState.FAILED)


class LeaseState(FixedWord):
    """The states of a lease, which ends when its node has released everything that was lent."""

    GRANTED = "GRANTED"
    ACTIVE = "ACTIVE"
    RELEASING = "RELEASING"
    RELEASED = "RELEASED"


class SessionState(FixedWord):
    """The states of a session: it is WAITING until a node is chosen for its sandbox.

    MOVING means that its files leave their node, after which it waits for another node.
    """

    WAITING = "WAITING"
    OPENING = "OPENING"
    IDLE = "IDLE"
    BUSY = "BUSY"
    MOVING = "MOVING"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"
    LOST = "LOST"


class NodeState(FixedWord):
    """The states of a node. A worker that comes back after its node was given up joins as a new
    node.

    AWAY means that the broker was started again and waits for the node's worker to come back.
    """

    UP = "UP"
    AWAY = "AWAY"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    DOWN = "DOWN"


class AllocState(FixedWord):
    """The states of an allocation: requested, in Slurm's queue, granted, to be ended, ended."""

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
# What accounting counts as failed: everything but success, what somebody cancelled, and what was
# preempted. An action that ends as PREEMPTED is one of background processes that gave its CPUs back
# and asks again; any other action waits again after a preemption.
UNSUCCESSFUL = ENDED - {ActionState.COMPLETED, ActionState.CANCELLED, ActionState.PREEMPTED}
