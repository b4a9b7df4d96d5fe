"""Pure. The values of the elastic hybrid pool: what it is told, what it orders, what travels on the
gradient channel. Which move is legal is `scheduler/state/transitions.py`, who moves is
`libra/hybrid/hybrid_pool.py`.

A *replica* is what training takes or gives back as a whole: one complete data-parallel replica.
Its *members* are its ranks, one a GPU; a member's number is its GPU's. A *core* is one of the
data-parallel replicas that train always, by its place in their group. Times are ns, ratios whole
thousandths ("permille").
"""

from __future__ import annotations

from enum import Enum
from typing import Union

import msgspec


class ReplicaState(str, Enum):
    """A replica's way into training and back; it moves as a whole. LOST: at least one of its
    members is gone, or was never seen; those that live serve rollouts."""

    ROLLOUT = "ROLLOUT"
    REQUESTED = "REQUESTED"
    FETCHING_STATE = "FETCHING_STATE"
    ZERO_SYNC = "ZERO_SYNC"
    ACTIVATING = "ACTIVATING"
    ACTIVE = "ACTIVE"
    LEAVING = "LEAVING"
    RETURNING = "RETURNING"
    LOST = "LOST"


class Role(str, Enum):
    """Whose a GPU is; exactly one at any time. HYBRID_JOINING: neither serves nor counts; on its
    way in either direction."""

    CORE_TRAINING = "CORE_TRAINING"
    CORE_ROLLOUT = "CORE_ROLLOUT"
    HYBRID_ROLLOUT = "HYBRID_ROLLOUT"
    HYBRID_JOINING = "HYBRID_JOINING"
    HYBRID_TRAINING = "HYBRID_TRAINING"
    LOST = "LOST"


class End(str, Enum):
    """What became of a join. Each one is told JOINED or ROLLED_BACK, or LOST if a member was lost
    first; one that was JOINED is later told LEFT or LOST."""

    JOINED = "JOINED"
    ROLLED_BACK = "ROLLED_BACK"
    LEFT = "LEFT"
    LOST = "LOST"


# ---- events: what the pool is told --------------------------------------------------------------


class PoolEvent(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The common head of all events."""


class Signal(PoolEvent, frozen=True, tag="signal"):
    """How the two stages of the pipeline stand to each other.

    Attributes:
        version: ascends; one that is not newer than the last is ignored.
        step: the train_step it was measured at; it is believed for `PoolRules.ttl_steps` more.
        train_ns, rollout_ns: how long each stage takes for a step.
        pressure_permille: how full the queues in front of rollout are.
        planned: replicas that the planner wants in training; 0: it wants none in particular.
    """

    version: int
    step: int
    train_ns: int
    rollout_ns: int
    pressure_permille: int = 0
    planned: int = 0


class StepBegins(PoolEvent, frozen=True, tag="step-begins"):
    """The core is between two train_steps: `step` is about to begin, on parameters `version`. Only
    here does anybody begin or cease to count."""

    step: int
    version: int


class MemberUp(PoolEvent, frozen=True, tag="member-up"):
    """A member lives and serves rollouts; each incarnation of it has a higher `incarnation`."""

    member: int
    incarnation: int


class MemberLost(PoolEvent, frozen=True, tag="member-lost"):
    """This incarnation of a member is over."""

    member: int
    incarnation: int
    reason: str = ""


class MemberDone(PoolEvent, frozen=True, tag="member-done"):
    """A member has done what `Ask` of this generation and stage told it."""

    member: int
    incarnation: int
    generation: int
    stage: ReplicaState


class MemberFailed(PoolEvent, frozen=True, tag="member-failed"):
    """A member lives but cannot go on with this join."""

    member: int
    incarnation: int
    generation: int
    reason: str


class JoinCancelled(PoolEvent, frozen=True, tag="join-cancelled"):
    """Somebody wants this replica back in rollout; it counts to the end of the step if it does."""

    replica: int
    generation: int
    reason: str = ""


AnyPoolEvent = Union[Signal, StepBegins, MemberUp, MemberLost, MemberDone, MemberFailed,  # noqa: UP007
                JoinCancelled]


# ---- orders: what the pool wants done ----------------------------------------------------------


class Order(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The common head of all orders."""


class Ask(Order, frozen=True, tag="ask"):
    """A member shall do this stage and then say `MemberDone`: REQUESTED: take no more rollouts, end
    or hand on those it has; FETCHING_STATE: fetch parameters; ZERO_SYNC: connect to its core's
    channel and follow each step, contributing zero; RETURNING: end all of that and serve rollouts.
    """

    member: int
    incarnation: int
    replica: int
    generation: int
    stage: ReplicaState
    core: int


class ContributorId(msgspec.Struct, frozen=True, array_like=True):
    """A replica of one generation and the core that its gradients are added to."""

    replica: int
    generation: int
    core: int


class StepPlan(Order, frozen=True, tag="step-plan"):
    """Who counts in a train_step, and who follows it with zero. `epoch` rises whenever `counting`
    changes."""

    step: int
    version: int
    epoch: int
    counting: tuple[ContributorId, ...] = ()
    following: tuple[ContributorId, ...] = ()


class EvictReplica(Order, frozen=True, tag="expel"):
    """Nothing of this replica is to be waited for or added any more, in the running step too."""

    replica: int
    generation: int
    reason: str


class Kill(Order, frozen=True, tag="kill"):
    """A member did not come back in time: end this incarnation of it, so that its GPU is nobody's.
    """

    member: int
    incarnation: int
    reason: str


class JoinEnded(Order, frozen=True, tag="settled"):
    """News, nothing to do: what became of a join."""

    replica: int
    generation: int
    end: End
    reason: str = ""


AnyOrder = Union[Ask, StepPlan, EvictReplica, Kill, JoinEnded]  # noqa: UP007


# ---- the channel
# ----------------------------------------------------------------------------------


class GradientHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a gradient payload says of itself; see `libra/hybrid/gradient_filter.py` for when it is
    believed.

    Attributes:
        replica, generation, epoch, step, version: as in the `StepPlan` it was computed under.
        samples: how many samples it is the sum over; 0 of one who only follows.
        size: elements.
        dtype: numpy's name of their type.
    """

    replica: int
    generation: int
    epoch: int
    step: int
    version: int
    samples: int
    size: int
    dtype: str
