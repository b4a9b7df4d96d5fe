"""Pure. The state machine of the elastic hybrid pool: rollout GPUs that help in training and go
back.

A pool of complete data-parallel replicas joins training when training is the longer stage, and
returns when rollout needs the GPUs (Libra, arXiv 2606.03077, elastic hybrid pool). Events go in,
orders come out, and `now` is handed in (ns). A replica enters a stage of a join when all of its
members have reported the stage before; a failure, a timeout or a cancellation at any stage sends
the whole replica back to rollout.

Invariants: a replica begins and stops counting only between two steps, except that `EvictReplica`
ends it at once. An event that names another generation, stage or incarnation than the present one
changes nothing. The core's GPUs are fixed and never named in an order. A GPU leaves rollout when
its server has confirmed REQUESTED, and serves again when its trainer has confirmed RETURNING or is
dead: so no GPU is ever in two roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...domain.hybrid import (
    AnyOrder,
    AnyPoolEvent,
    ContributorId,
    EvictReplica,
    JoinCancelled,
    JoinEnded,
    JoinOutcome,
    KillMember,
    MemberDone,
    MemberFailed,
    MemberLost,
    MemberUp,
    PipelineSignal,
    Role,
    StageOrder,
    StepBegins,
    StepPlan,
)
from ...domain.hybrid import ReplicaState as R
from ...errors import InvalidInput
from ...scheduler.state.transitions import REPLICA_MOVES, move
from .hybrid_signal import PoolRules, ReplicaTarget

# each stage of a join that members carry out, and the stage after it
_NEXT = {R.REQUESTED: R.FETCHING_STATE, R.FETCHING_STATE: R.ZERO_SYNC, R.ZERO_SYNC: R.ACTIVATING}
_JOINING = frozenset({*_NEXT, R.ACTIVATING})
_COUNTS = frozenset({R.ACTIVE, R.LEAVING})
_ROLES = {R.ROLLOUT: Role.HYBRID_ROLLOUT, R.LOST: Role.HYBRID_ROLLOUT,
          R.ACTIVE: Role.HYBRID_TRAINING, R.LEAVING: Role.HYBRID_TRAINING}


@dataclass(slots=True)
class _Member:
    """The process of one GPU: its last known incarnation, and whether it is still alive."""

    incarnation: int = -1
    alive: bool = False


@dataclass(slots=True)
class _Replica:
    """One replica, and the progress of its join or return.

    Attributes:
        number: Its place in the pool's list of replicas.
        members: Its GPUs, in rank order.
        state: See `ReplicaState`.
        generation: How many joins it has begun.
        core: The core that it helps in this join.
        joined: Whether this join has reached ACTIVE.
        reason: Why it goes back to rollout; empty while it does not go back.
        deadline: When the current state times out, in ns; 0 for never.
        not_before: The first step at which it may be asked to join again.
        waits_for: Members that have not yet completed the current stage, in order; values are
            unused.
    """

    number: int
    members: tuple[int, ...]
    state: R = R.LOST
    generation: int = 0
    core: int = 0
    joined: bool = False
    reason: str = ""
    deadline: int = 0
    not_before: int = 0
    waits_for: dict[int, None] = field(default_factory=dict)

    @property
    def contributor(self) -> ContributorId:
        return ContributorId(self.number, self.generation, self.core)


class HybridPool:
    """The pool's state. Handling an event is O(replicas + members).

    Args:
        rules: Thresholds and timeouts.
        core_training: The GPUs of each core; all cores have equally many.
        core_rollout: GPUs that always serve rollouts.
        replicas: The members' GPUs of each hybrid replica. A replica is LOST until `MemberUp` has
            arrived for each of them.

    Raises:
        InvalidInput: A GPU is named twice, or a replica has more or fewer GPUs than a core.
    """

    def __init__(self, rules: PoolRules, core_training: Sequence[Sequence[int]],
                 core_rollout: Sequence[int], replicas: Sequence[Sequence[int]]) -> None:
        self._rules, self._target = rules, ReplicaTarget(rules)
        self.core_training = tuple(tuple(gpus) for gpus in core_training)
        self.core_rollout = tuple(core_rollout)
        self.replicas = tuple(tuple(gpus) for gpus in replicas)
        _check_places(self.core_training, self.core_rollout, self.replicas)
        self._replicas = [_Replica(n, gpus) for n, gpus in enumerate(self.replicas)]
        self._home = {gpu: replica for replica in self._replicas for gpu in replica.members}
        self._members = {gpu: _Member() for gpu in self._home}
        self._counting: tuple[ContributorId, ...] = ()
        self._step, self.epoch, self.ignored = -1, 0, 0
        self._orders: list[AnyOrder] = []

    # ---- queries ----

    def roles(self) -> dict[int, Role]:
        """The role of each GPU."""
        told = {gpu: Role.CORE_TRAINING for gpus in self.core_training for gpu in gpus}
        told |= dict.fromkeys(self.core_rollout, Role.CORE_ROLLOUT)
        for replica in self._replicas:
            role = _ROLES.get(replica.state, Role.HYBRID_JOINING)
            for gpu in replica.members:
                told[gpu] = role if self._members[gpu].alive else Role.LOST
        return told

    def state(self, replica: int) -> R:
        """Returns the state in which a replica is now."""
        return self._replicas[replica].state

    def rests(self, replica: int) -> bool:
        """Whether a replica is in rollout and may not join again yet, because its last join failed.
        """
        one = self._replicas[replica]
        return one.state is R.ROLLOUT and max(0, self._step) < one.not_before

    def generation(self, replica: int) -> int:
        """The number of a replica's last join; 0 before the first."""
        return self._replicas[replica].generation

    def next_deadline(self) -> int | None:
        """When `tick` has to be called next if no event arrives, in ns; None for never."""
        return min((r.deadline for r in self._replicas if r.deadline), default=None)

    # ---- events ----

    def handle(self, event: AnyPoolEvent, now: int) -> list[AnyOrder]:
        """Handles one event and returns the orders that follow, in order."""
        match event:
            case MemberDone():
                known = self._done(event, now)
            case MemberFailed():
                known = self._failed(event, now)
            case MemberLost(member=member, incarnation=incarnation, reason=reason):
                known = self._is_current(member, incarnation)
                if known:
                    self._lose(member, reason or "died", now)
            case MemberUp(member=member, incarnation=incarnation):
                known = self._up(member, incarnation, now)
            case JoinCancelled(replica=number, generation=generation, reason=reason):
                known = self._cancel(number, generation, reason or "cancelled", now)
            case StepBegins(step=step, version=version):
                known = step > self._step
                if known:
                    self._begin(step, version, now)
            case PipelineSignal():
                known = self._target.update(event)
                if known:
                    self._follow_target(now)
        self.ignored += not known
        return self._taken()

    def tick(self, now: int) -> list[AnyOrder]:
        """Rolls back replicas, and kills members, that have exceeded their deadlines at `now`."""
        for replica in self._replicas:
            if not replica.deadline or now < replica.deadline:
                continue
            if replica.state is R.RETURNING:
                for member in list(replica.waits_for):
                    late = "did not come back in time"
                    self._order(KillMember(member, self._members[member].incarnation, late))
                    self._lose(member, late, now)
            else:
                whom = ", ".join(map(str, replica.waits_for)) or "the next step"
                self._roll_back(replica, f"{replica.state.value} timed out waiting for {whom}", now)
        return self._taken()

    # ---- members ----

    def _is_current(self, member: int, incarnation: int) -> bool:
        known = self._members.get(member)
        return known is not None and known.alive and known.incarnation == incarnation

    def _up(self, number: int, incarnation: int, now: int) -> bool:
        member = self._members.get(number)
        if member is None or incarnation <= member.incarnation:
            return False
        if member.alive:  # the report of its death has not arrived yet
            self._lose(number, "began a new incarnation", now)
        member.incarnation, member.alive = incarnation, True
        replica = self._home[number]
        if replica.state is R.LOST and all(self._members[m].alive for m in replica.members):
            self._to(replica, R.ROLLOUT, 0)
            self._follow_target(now)
        return True

    def _lose(self, number: int, reason: str, now: int) -> None:
        """Marks a member as dead, and moves its replica to RETURNING or LOST."""
        replica = self._home[number]
        self._members[number].alive = False
        replica.waits_for.pop(number, None)
        if replica.state is R.RETURNING:
            self._maybe_home(replica, now)
        elif replica.state is R.ROLLOUT:
            self._to(replica, R.LOST, 0)
        elif replica.state is not R.LOST:
            self._roll_back(replica, f"member {number} {reason}", now)

    def _done(self, event: MemberDone, now: int) -> bool:
        replica = self._home.get(event.member)
        if (replica is None or not self._is_current(event.member, event.incarnation)
                or event.generation != replica.generation or event.stage is not replica.state
                or event.member not in replica.waits_for):
            return False
        del replica.waits_for[event.member]
        if replica.state is R.RETURNING:
            self._maybe_home(replica, now)
        elif not replica.waits_for:
            self._stage(replica, _NEXT[replica.state], now)
        return True

    def _failed(self, event: MemberFailed, now: int) -> bool:
        replica = self._home.get(event.member)
        if (replica is None or not self._is_current(event.member, event.incarnation)
                or event.generation != replica.generation):
            return False
        if replica.state not in _JOINING | _COUNTS:
            return False  # the member failed before it received the order to return
        self._roll_back(replica, f"member {event.member}: {event.reason}", now)
        return True

    # ---- moving a replica ----

    def _to(self, replica: _Replica, state: R, deadline: int) -> None:
        replica.state = move(REPLICA_MOVES, replica.state, state, replica)
        replica.deadline = deadline

    def _stage(self, replica: _Replica, state: R, now: int) -> None:
        """Enters a stage of a join and asks the members to do it."""
        if state is R.ACTIVATING:
            self._to(replica, state, now + self._rules.boundary_timeout_ns)
            return
        self._to(replica, state, now + self._rules.stage_timeout_ns)
        self._ask(replica)

    def _ask(self, replica: _Replica) -> None:
        alive = [m for m in replica.members if self._members[m].alive]
        replica.waits_for = dict.fromkeys(alive)
        for member in alive:
            self._order(StageOrder(member, self._members[member].incarnation, replica.number,
                                   replica.generation, replica.state, replica.core))

    def _roll_back(self, replica: _Replica, reason: str, now: int) -> None:
        """Ends a join that failed; the replica is not asked again for `retry_steps`."""
        replica.not_before = self._step + 1 + self._rules.retry_steps
        self._return(replica, reason, now)

    def _return(self, replica: _Replica, reason: str, now: int) -> None:
        if replica.state is not R.REQUESTED and replica.state is not R.FETCHING_STATE:
            self._order(EvictReplica(replica.number, replica.generation, reason))
        replica.reason = reason
        self._to(replica, R.RETURNING, now + self._rules.stage_timeout_ns)
        self._ask(replica)
        self._maybe_home(replica, now)

    def _maybe_home(self, replica: _Replica, now: int) -> None:
        """Ends the return if all members have reported it as done."""
        if replica.waits_for:
            return
        whole = all(self._members[m].alive for m in replica.members)
        self._to(replica, R.ROLLOUT if whole else R.LOST, 0)
        end = (JoinOutcome.LOST if not whole else JoinOutcome.LEFT if replica.joined
               else JoinOutcome.ROLLED_BACK)
        self._order(JoinEnded(replica.number, replica.generation, end, replica.reason))
        replica.joined, replica.reason = False, ""
        self._follow_target(now)

    def _cancel(self, number: int, generation: int, reason: str, now: int) -> bool:
        replica = self._replicas[number] if 0 <= number < len(self._replicas) else None
        if replica is None or replica.generation != generation:
            return False
        if replica.state in _JOINING:
            self._roll_back(replica, reason, now)
        elif replica.state is R.ACTIVE:
            replica.not_before = self._step + 1 + self._rules.retry_steps
            self._leave(replica, reason, now)
        else:
            return False
        return True

    def _leave(self, replica: _Replica, reason: str, now: int) -> None:
        """Marks an active replica as leaving; it counts to the end of the running step."""
        replica.reason = reason
        self._to(replica, R.LEAVING, now + self._rules.boundary_timeout_ns)

    # ---- steps and the target ----

    def _begin(self, step: int, version: int, now: int) -> None:
        self._step = step
        for replica in self._replicas:
            if replica.state is R.LEAVING:  # the replica goes back, whatever the target is now
                self._return(replica, replica.reason, now)
        self._follow_target(now)
        for replica in self._replicas:
            if replica.state is R.LEAVING:  # the replica was told to leave at this boundary
                self._return(replica, replica.reason, now)
            elif replica.state is R.ACTIVATING:
                self._to(replica, R.ACTIVE, 0)
                replica.joined = True
                self._order(JoinEnded(replica.number, replica.generation, JoinOutcome.JOINED))
        counting = tuple(r.contributor for r in self._replicas if r.state is R.ACTIVE)
        if counting != self._counting:
            self._counting, self.epoch = counting, self.epoch + 1
        following = tuple(r.contributor for r in self._replicas if r.state is R.ZERO_SYNC)
        self._order(StepPlan(step, version, self.epoch, counting, following))

    def _follow_target(self, now: int) -> None:
        """Asks replicas to join, or sends them back, until the wanted number is in training."""
        wanted = self._target.settle(self._step, self._spare())
        inside = [r for r in self._replicas if r.state in _JOINING or r.state is R.ACTIVE]
        # First keep replicas that were about to leave, which costs nothing.
        for replica in self._replicas:
            if (len(inside) < wanted and replica.state is R.LEAVING
                    and self._step >= replica.not_before):
                self._to(replica, R.ACTIVE, 0)
                replica.reason = ""
                inside.append(replica)
        for replica in self._replicas:
            if (len(inside) < wanted and replica.state is R.ROLLOUT
                    and self._step >= replica.not_before):
                self._request(replica, now)
                inside.append(replica)
        # joining replicas go before active ones, the highest number first
        leaving = sorted(inside, key=lambda r: (r.state is R.ACTIVE, -r.number))
        for replica in leaving[: max(0, len(inside) - wanted)]:
            if replica.state is R.ACTIVE:
                self._leave(replica, "not wanted any more", now)
            else:
                self._return(replica, "not wanted any more", now)

    def _request(self, replica: _Replica, now: int) -> None:
        taken = [r.core for r in self._replicas if r.state in _JOINING | _COUNTS]
        replica.generation += 1
        replica.core = min(range(len(self.core_training)), key=lambda c: (taken.count(c), c))
        self._stage(replica, R.REQUESTED, now)

    def _spare(self) -> int:
        """How many replicas may be in training at once: (rollout GPUs - reserved) / replica size.

        Only replicas all of whose members live are counted. The formula is Libra's.
        """
        whole = [r for r in self._replicas if all(self._members[m].alive for m in r.members)]
        if not whole:
            return 0
        alive = sum(member.alive for member in self._members.values())
        room = len(self.core_rollout) + alive - self._rules.reserved_gpus
        return max(0, min(len(whole), room // len(whole[0].members)))

    # ---- orders ----

    def _order(self, order: AnyOrder) -> None:
        self._orders.append(order)

    def _taken(self) -> list[AnyOrder]:
        orders, self._orders = self._orders, []
        return orders


def _check_places(cores: tuple[tuple[int, ...], ...], rollout: tuple[int, ...],
                  replicas: tuple[tuple[int, ...], ...]) -> None:
    seen: dict[int, None] = {}
    for gpu in [gpu for group in (*cores, rollout, *replicas) for gpu in group]:
        if gpu in seen:
            raise InvalidInput(f"hybrid pool: GPU {gpu} is named twice; name each GPU once")
        seen[gpu] = None
    if not cores or not all(cores):
        raise InvalidInput("hybrid pool: core_training: name at least one core, each with at least "
                           "one GPU")
    for gpus in replicas:
        if len(gpus) != len(cores[0]):
            raise InvalidInput(f"hybrid pool: replica {list(gpus)} has {len(gpus)} GPUs; a "
                               f"complete replica has as many as a core: {len(cores[0])}")
    if any(len(gpus) != len(cores[0]) for gpus in cores):
        raise InvalidInput("hybrid pool: core_training: all cores must have the same number of "
                           "GPUs")
