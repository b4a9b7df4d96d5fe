"""Pure. The elastic hybrid pool: rollout GPUs that join training as whole replicas and go back.

Law: a replica is one complete data-parallel copy (all its ranks) and changes its role as a whole;
it trains only after every rank has passed every stage of one generation, and from the next train
step on; a rank that fails, a deadline that passes or an order to stop rolls all of it back to
rollout. Words of an old generation are ignored; a payload counts only if its replica trains, and
generation, step, state version and membership epoch all match. Core groups are not known here.
(Libra, arXiv 2606.03077, its elastic hybrid pool; orders and reports are our words.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..errors import InvalidInput
from .transitions import move


class Role(Enum):
    """What a replica's GPUs do."""

    ROLLOUT = "rollout"
    JOINING = "joining"  # rolls out no more, trains not yet: counts as zero
    TRAINING = "training"
    LEAVING = "leaving"  # trains no more, rolls out not yet


class Stage(Enum):
    """How far a joining rank has come, in this order."""

    REQUESTED = "requested"
    FETCHING_STATE = "fetching_state"
    ZERO_SYNC = "zero_sync"
    ACTIVATING = "activating"
    ACTIVE = "active"


STAGES = tuple(Stage)
ROLE_MOVES: dict[Enum, set[Enum]] = {
    Role.ROLLOUT: {Role.JOINING},
    Role.JOINING: {Role.TRAINING, Role.LEAVING},
    Role.TRAINING: {Role.LEAVING},
    Role.LEAVING: {Role.ROLLOUT},
}


@dataclass(frozen=True)
class PoolRules:
    """When to lend. Ratios and pressure in 1/1000, times in ns."""

    borrow_ratio: int = 1150  # T_train / T_rollout from which all that is spare joins
    release_ratio: int = 900  # and up to which none stays
    pressure_max: int = 800  # of rollout; from here on none stays
    ttl_steps: int = 20  # a signal is believed for so many train steps
    join_timeout_ns: int = 180 * 10**9
    leave_timeout_ns: int = 180 * 10**9
    cooldown_steps: int = 1  # a replica stays so many train steps in its role

    def __post_init__(self) -> None:
        if not 0 <= self.release_ratio < self.borrow_ratio:
            raise InvalidInput(f"hybrid pool: release_ratio {self.release_ratio} must lie below "
                               f"borrow_ratio {self.borrow_ratio}")
        for name in ("pressure_max", "ttl_steps", "join_timeout_ns", "leave_timeout_ns"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"hybrid pool: {name} {getattr(self, name)}: at least 1")


class PoolSignal(NamedTuple):
    """What is known at a train step: `version` ascends; `planned` are the replicas that the plan
    wants training to get besides its core, 0 for none, None without a plan."""

    version: int
    step: int
    train_ns: int
    rollout_ns: int
    pressure: int
    planned: int | None = None


def wanted(signal: PoolSignal, spare: int, held: int, rules: PoolRules) -> int:
    """How many replicas should train: pressure first, then the plan, then the ratio of the stages;
    between the thresholds those that do. At most `spare`. O(1)."""
    if signal.pressure >= rules.pressure_max:
        return 0
    if signal.planned:
        return min(signal.planned, spare)
    ratio = 1000 * signal.train_ns // max(1, signal.rollout_ns)
    if ratio >= rules.borrow_ratio:
        return spare
    if ratio <= rules.release_ratio:
        return 0
    return min(held, spare)


class Join(NamedTuple):
    """Order: this replica joins training, under this generation."""

    replica: int
    generation: int


class Leave(NamedTuple):
    """Order: this replica goes back to rollout; also the order to give up a join."""

    replica: int
    generation: int


class Payload(NamedTuple):
    """What a joined replica's gradients say of themselves."""

    replica: int
    generation: int
    step: int
    state_version: int
    epoch: int


@dataclass
class Replica:
    """One that may be lent: its GPUs, and whom it would help."""

    id: int
    gpus: tuple[int, ...]
    ranks: int
    core: int  # the core replica to whose gradients it adds
    role: Role = Role.ROLLOUT
    generation: int = 0
    stages: list[Stage] = field(default_factory=list)
    back: set[int] = field(default_factory=set)  # ranks that are rollout again
    deadline: int = 0
    since_step: int = -1 << 30
    counts: bool = False  # its gradients are awaited in the present step
    lost: bool = False


class HybridPool:
    """All replicas that may be lent. Time is handed in; every change is an order or a report.

    Memory and each call: O(replicas).
    """

    def __init__(self, rules: PoolRules, replicas: Iterable[tuple[Sequence[int], int]],
                 cores: int, reserved: int = 0) -> None:
        """`replicas`: GPUs and ranks of each; `cores`: replicas of the core, which are helped in
        turn; `reserved`: so many of `replicas` always stay with rollout.

        Raises:
            InvalidInput: a GPU is in two replicas, or there is nobody to help.
        """
        self.rules, self.reserved = rules, reserved
        if cores < 1:
            raise InvalidInput(f"hybrid pool: cores {cores}: training needs a core replica")
        self.replicas = {i: Replica(i, tuple(gpus), ranks, i % cores)
                         for i, (gpus, ranks) in enumerate(replicas)}
        every = [g for r in self.replicas.values() for g in r.gpus]
        twice = next((g for g in every if every.count(g) > 1), None)
        if twice is not None:
            raise InvalidInput(f"hybrid pool: GPU {twice} is in two replicas")
        self.epoch = 0  # of membership: grows whenever who trains changes
        self.step = -1
        self._signal: PoolSignal | None = None

    # ---- what is told ------------------------------------------------------------------------

    def signalled(self, signal: PoolSignal) -> bool:
        """A signal; False and ignored if it is not newer than the last."""
        if self._signal is not None and signal.version <= self._signal.version:
            return False
        self._signal = signal
        return True

    def began_step(self, step: int) -> list[Replica]:
        """A train step begins: who counts in it, fixed until the next. A replica that became
        active since joins here, and only here."""
        assert step > self.step, f"train step {step} after {self.step}"
        self.step = step
        for replica in self.replicas.values():
            ready = (replica.role is Role.JOINING
                     and all(s is Stage.ACTIVE for s in replica.stages))
            if ready:
                self._move(replica, Role.TRAINING)
                replica.since_step, replica.counts = step, True
                self.epoch += 1
        return self.training()

    def reached(self, replica: int, generation: int, rank: int, stage: Stage) -> bool:
        """A joining rank reports a stage; False if that is stale or out of order."""
        one = self.replicas[replica]
        if one.role is not Role.JOINING or one.generation != generation:
            return False
        if STAGES.index(stage) != STAGES.index(one.stages[rank]) + 1:
            return False
        one.stages[rank] = stage
        return True

    def returned(self, replica: int, generation: int, rank: int) -> bool:
        """A rank serves rollout again; with the last one the replica does."""
        one = self.replicas[replica]
        if one.role is not Role.LEAVING or one.generation != generation:
            return False
        one.back.add(rank)
        if len(one.back) == one.ranks:
            self._move(one, Role.ROLLOUT)
            one.since_step, one.lost = self.step, False
        return True

    def failed(self, now: int, replica: int, generation: int) -> list[Leave]:
        """A rank of it failed or is gone: the whole replica goes back. The orders."""
        one = self.replicas[replica]
        if one.generation != generation or one.role not in (Role.JOINING, Role.TRAINING):
            return []
        return [self._leave(now, one)]

    def accepts(self, payload: Payload, state_version: int) -> bool:
        """Whether these gradients are added to those of the present step."""
        one = self.replicas.get(payload.replica)
        return (one is not None and one.role is Role.TRAINING and one.counts
                and payload.generation == one.generation and payload.step == self.step
                and payload.state_version == state_version and payload.epoch == self.epoch)

    # ---- what is ordered ---------------------------------------------------------------------

    def plan(self, now: int) -> list[Join | Leave]:
        """Orders for now: what has run out of time goes back, then as many join or leave as the
        signal wants. A signal that is too old wants none."""
        orders: list[Join | Leave] = []
        for one in self.replicas.values():
            if one.role is Role.JOINING and now >= one.deadline:
                orders.append(self._leave(now, one))
            elif one.role is Role.LEAVING and now >= one.deadline and not one.lost:
                one.lost = True  # reported; not lent again unless it comes back
        held = [r for r in self.replicas.values() if r.role in (Role.JOINING, Role.TRAINING)]
        want = self._want(len(held))
        for i in range(len(held) - 1, want - 1, -1):
            one = held[i]
            if (one.role is Role.JOINING or self._settled(one) or self._expired()
                    or i >= self.spare()):
                orders.append(self._leave(now, one))
        for one in self.replicas.values():
            if len(held) >= want:
                break
            if one.role is Role.ROLLOUT and not one.lost and self._settled(one):
                held.append(one)
                orders.append(self._join(now, one))
        return orders

    def recall(self, now: int) -> list[Leave]:
        """Training has nothing to do, or another split comes: everybody goes back, whatever the
        cooldown."""
        return [self._leave(now, r) for r in self.replicas.values()
                if r.role in (Role.JOINING, Role.TRAINING)]

    def spare(self) -> int:
        """Replicas that may train at all: those alive, less the reserved."""
        return max(0, sum(1 for r in self.replicas.values() if not r.lost) - self.reserved)

    def training(self) -> list[Replica]:
        """Those whose gradients are awaited in this step."""
        return [r for r in self.replicas.values() if r.role is Role.TRAINING and r.counts]

    def rolling(self) -> list[Replica]:
        """Those whose GPUs serve rollout."""
        return [r for r in self.replicas.values() if r.role is Role.ROLLOUT and not r.lost]

    def check(self) -> None:
        """The laws: no GPU in two roles, none trains by halves, the reserve is kept."""
        held = 0
        for one in self.replicas.values():
            held += one.role in (Role.JOINING, Role.TRAINING)
            assert one.counts == (one.role is Role.TRAINING), f"{one}: counts without training"
            assert one.role is not Role.TRAINING or all(s is Stage.ACTIVE for s in one.stages)
            assert len(one.stages) in (0, one.ranks) and len(one.back) <= one.ranks
        assert held <= self.spare(), "the reserve was lent"

    # ---- within ------------------------------------------------------------------------------

    def _expired(self) -> bool:
        return self._signal is None or self.step - self._signal.step >= self.rules.ttl_steps

    def _want(self, held: int) -> int:
        if self._signal is None or self._expired():
            return 0
        return wanted(self._signal, self.spare(), held, self.rules)

    def _settled(self, one: Replica) -> bool:
        return self.step - one.since_step >= self.rules.cooldown_steps

    def _join(self, now: int, one: Replica) -> Join:
        self._move(one, Role.JOINING)
        one.generation += 1
        one.stages = [Stage.REQUESTED] * one.ranks
        one.deadline = now + self.rules.join_timeout_ns
        return Join(one.id, one.generation)

    def _leave(self, now: int, one: Replica) -> Leave:
        if one.role is Role.TRAINING:
            self.epoch += 1
        self._move(one, Role.LEAVING)
        one.stages, one.back, one.counts = [], set(), False
        one.deadline = now + self.rules.leave_timeout_ns
        return Leave(one.id, one.generation)

    @staticmethod
    def _move(one: Replica, role: Role) -> None:
        one.role = move(ROLE_MOVES, one.role, role, one)
