"""Pure. The values of the elastic hybrid pool: its events, its orders, and the header of a
gradient.

The hybrid pool moves rollout GPUs into training and back. A *replica* is a complete data-parallel
replica, which training takes and gives back as a whole. Its *members* are its ranks, one for each
GPU, and a member's number is the number of its GPU. A *core* is one of the data-parallel replicas
that always train, numbered by its place in their group.

`scheduler/state/transitions.py` says which moves of a replica are legal;
`libra/hybrid/hybrid_pool.py` decides which replica moves when. This module holds values only. Times
are in ns, ratios in whole thousandths (permille).
"""

from __future__ import annotations

from typing import Union

import msgspec

from .states import FixedWord


class ReplicaState(FixedWord):
    """The states of a replica on its way into training and back. All members of a replica change
    their state together.

    In LOST at least one member is gone or has never been seen; its living members serve rollouts.
    """

    ROLLOUT = "ROLLOUT"
    REQUESTED = "REQUESTED"
    FETCHING_STATE = "FETCHING_STATE"
    ZERO_SYNC = "ZERO_SYNC"
    ACTIVATING = "ACTIVATING"
    ACTIVE = "ACTIVE"
    LEAVING = "LEAVING"
    RETURNING = "RETURNING"
    LOST = "LOST"


class Role(FixedWord):
    """What a GPU is used for. Each GPU has exactly one role at any time.

    A GPU in HYBRID_JOINING neither serves rollouts nor counts in training: it is on its way in
    either direction.
    """

    CORE_TRAINING = "CORE_TRAINING"
    CORE_ROLLOUT = "CORE_ROLLOUT"
    HYBRID_ROLLOUT = "HYBRID_ROLLOUT"
    HYBRID_JOINING = "HYBRID_JOINING"
    HYBRID_TRAINING = "HYBRID_TRAINING"
    LOST = "LOST"


class JoinOutcome(FixedWord):
    """The outcome of a join.

    Each join is reported as JOINED or ROLLED_BACK, or as LOST if a member was lost first. A join
    that was reported as JOINED is reported once more at its end, as LEFT or LOST.
    """

    JOINED = "JOINED"
    ROLLED_BACK = "ROLLED_BACK"
    LEFT = "LEFT"
    LOST = "LOST"


# ---- events: what the pool is told --------------------------------------------------------------


class PoolEvent(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base class of all events that the pool handles."""


class PipelineSignal(PoolEvent, frozen=True, tag="signal"):
    """How long the two stages of the pipeline take, and how many replicas the planner wants.

    Attributes:
        version: Ascending number; a signal that is not newer than the last one is ignored.
        step: The train_step at which it was measured; it counts for `PoolRules.ttl_steps` more
            steps.
        train_ns, rollout_ns: How long each stage takes for one step.
        pressure_permille: How full the queues in front of the rollouts are.
        planned: How many replicas the planner wants in training; 0 leaves the choice to the times.
    """

    version: int
    step: int
    train_ns: int
    rollout_ns: int
    pressure_permille: int = 0
    planned: int = 0


Signal = PipelineSignal  # its old name, for one release


class StepBegins(PoolEvent, frozen=True, tag="step-begins"):
    """The core is between two train_steps: `step` is about to begin, on parameters `version`.

    Only at this event does a replica begin to contribute gradients that count, or stop.
    """

    step: int
    version: int


class MemberUp(PoolEvent, frozen=True, tag="member-up"):
    """A member lives and serves rollouts. A restarted member has a higher `incarnation`."""

    member: int
    incarnation: int


class MemberLost(PoolEvent, frozen=True, tag="member-lost"):
    """This incarnation of a member has ended."""

    member: int
    incarnation: int
    reason: str = ""


class MemberDone(PoolEvent, frozen=True, tag="member-done"):
    """A member has carried out the `StageOrder` of this generation and stage."""

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
    """The replica is wanted back in rollout.

    If it counts in the running step, it still does so until the step's end.
    """

    replica: int
    generation: int
    reason: str = ""


AnyPoolEvent = Union[PipelineSignal, StepBegins, MemberUp, MemberLost, MemberDone,  # noqa: UP007
                     MemberFailed,
                JoinCancelled]


# ---- orders: what the pool wants done ----------------------------------------------------------


class Order(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base class of all orders that the pool gives."""


class StageOrder(Order, frozen=True, tag="ask"):
    """Tells a member to do one stage and to report `MemberDone` afterwards.

    REQUESTED: take no more rollouts, and finish or hand on the running ones. FETCHING_STATE: fetch
    the parameters. ZERO_SYNC: follow each step on its core's gradient channel, contributing zeros.
    RETURNING: leave the channel and serve rollouts again.
    """

    member: int
    incarnation: int
    replica: int
    generation: int
    stage: ReplicaState
    core: int


class ContributorId(msgspec.Struct, frozen=True, array_like=True):
    """A replica in one generation, and the core to which its gradients are added."""

    replica: int
    generation: int
    core: int


class StepPlan(Order, frozen=True, tag="step-plan"):
    """Which replicas count in a train_step, and which follow it with zeros.

    `epoch` grows by one whenever `counting` changes.
    """

    step: int
    version: int
    epoch: int
    counting: tuple[ContributorId, ...] = ()
    following: tuple[ContributorId, ...] = ()


class EvictReplica(Order, frozen=True, tag="expel"):
    """Tells the core not to wait for this replica any more and to add nothing from it, from the
    running step on.
    """

    replica: int
    generation: int
    reason: str


class KillMember(Order, frozen=True, tag="kill"):
    """Tells the driver to end this incarnation of a member, which did not come back in time, so
    that its GPU is free.
    """

    member: int
    incarnation: int
    reason: str


class JoinEnded(Order, frozen=True, tag="settled"):
    """Reports the outcome of a join. Nothing has to be done for this order."""

    replica: int
    generation: int
    end: JoinOutcome
    reason: str = ""


AnyOrder = Union[StageOrder, StepPlan, EvictReplica, KillMember, JoinEnded]  # noqa: UP007


# ---- the channel
# ----------------------------------------------------------------------------------


class GradientHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a gradient payload; `libra/hybrid/gradient_filter.py` checks it.

    Attributes:
        replica, generation, epoch, step, version: As in the `StepPlan` under which it was computed.
        samples: Over how many samples the gradient is summed; 0 for a replica that only follows.
        size: Number of elements.
        dtype: numpy's name of the elements' type.
    """

    replica: int
    generation: int
    epoch: int
    step: int
    version: int
    samples: int
    size: int
    dtype: str
