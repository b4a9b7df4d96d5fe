"""Pure. Every legal move between states, as one table each.

There are tables for actions, leases, sessions, nodes, hybrid replicas and allocations. Nothing else
decides whether a move is legal, and the pictures in docs/STATES.md are drawn from these tables.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from ...domain.hybrid import ReplicaState as R
from ...domain.states import ActionState as A
from ...domain.states import AllocState as C
from ...domain.states import LeaseState as L
from ...domain.states import NodeState as N
from ...domain.states import SessionState as S

_LEASE_ENDS = {A.COMPLETED, A.FAILED, A.TIMEOUT, A.OUT_OF_MEMORY, A.CANCELLED, A.NODE_FAIL,
               A.PREEMPTED}

ACTION_MOVES: dict[Enum, set[Enum]] = {
    A.PENDING: {A.CONFIGURING, A.CANCELLED, A.FAILED, A.NODE_FAIL, A.TIMEOUT},
    A.CONFIGURING: {A.RUNNING, A.PENDING, *_LEASE_ENDS},
    A.RUNNING: {A.PENDING, *_LEASE_ENDS},
}
LEASE_MOVES: dict[Enum, set[Enum]] = {
    L.GRANTED: {L.ACTIVE, L.RELEASING, L.RELEASED},
    L.ACTIVE: {L.RELEASING, L.RELEASED},
    L.RELEASING: {L.RELEASED},
}
SESSION_MOVES: dict[Enum, set[Enum]] = {
    S.WAITING: {S.OPENING, S.CLOSED},
    S.OPENING: {S.IDLE, S.CLOSING, S.CLOSED, S.LOST},
    S.IDLE: {S.BUSY, S.MOVING, S.CLOSING, S.CLOSED, S.LOST},
    S.BUSY: {S.IDLE, S.CLOSING, S.CLOSED, S.LOST},
    S.MOVING: {S.WAITING, S.CLOSING, S.CLOSED, S.LOST},
    S.CLOSING: {S.CLOSED, S.LOST},
}
NODE_MOVES: dict[Enum, set[Enum]] = {
    N.UP: {N.DRAINING, N.AWAY, N.DOWN},
    N.AWAY: {N.UP, N.DOWN},
    N.DRAINING: {N.DRAINED, N.UP, N.AWAY, N.DOWN},
    N.DRAINED: {N.UP, N.AWAY, N.DOWN},
}
REPLICA_MOVES: dict[Enum, set[Enum]] = {
    R.ROLLOUT: {R.REQUESTED, R.LOST},
    R.REQUESTED: {R.FETCHING_STATE, R.RETURNING},
    R.FETCHING_STATE: {R.ZERO_SYNC, R.RETURNING},
    R.ZERO_SYNC: {R.ACTIVATING, R.RETURNING},
    R.ACTIVATING: {R.ACTIVE, R.RETURNING},
    R.ACTIVE: {R.LEAVING, R.RETURNING},
    R.LEAVING: {R.ACTIVE, R.RETURNING},
    R.RETURNING: {R.ROLLOUT, R.LOST},
    R.LOST: {R.ROLLOUT},
}

ALLOC_MOVES: dict[Enum, set[Enum]] = {
    C.ASKED: {C.PENDING, C.RUNNING, C.ENDING, C.ENDED},
    C.PENDING: {C.RUNNING, C.ENDING, C.ENDED},
    C.RUNNING: {C.ENDING, C.ENDED},
    C.ENDING: {C.ENDED},
}

_State = TypeVar("_State", bound=Enum)


def move(table: dict[Enum, set[Enum]], old: _State, new: _State, story: object) -> _State:
    """Returns `new` if the table allows it from `old`; raises an AssertionError that shows `story`
    if not.
    """
    assert new in table.get(old, ()), f"illegal move {old.value} -> {new.value}: {story}"
    return new
