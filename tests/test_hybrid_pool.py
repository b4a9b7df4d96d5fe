"""The hybrid pool's laws, on any history that hypothesis can think of.

Law: what is drawn is the history itself, so that a failing one shrinks. The laws are proved twice:
on the pool's own answers after every fact, sensible or not, and from outside, by members that are
actors of their own behind slow, lossless channels, which die at any moment.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.core.hybrid_pool import HybridPool
from tangram_hpc.core.hybrid_signal import PoolRules, Wish
from tangram_hpc.domain.hybrid import (
    AnyFact,
    AnyOrder,
    Ask,
    End,
    Expel,
    JoinCancelled,
    Kill,
    MemberDone,
    MemberFailed,
    MemberLost,
    MemberUp,
    Role,
    Seat,
    Settled,
    Signal,
    StepBegins,
    StepPlan,
)
from tangram_hpc.domain.hybrid import ReplicaState as R
from tangram_hpc.errors import InvalidInput

S = 10**9
CORE, ROLLOUT, REPLICAS = ((0, 1), (2, 3)), (4, 5), ((6, 7), (8, 9), (10, 11))
HYBRID = [gpu for gpus in REPLICAS for gpu in gpus]
ASKED = (R.REQUESTED, R.FETCHING_STATE, R.ZERO_SYNC, R.RETURNING)
TRAIN, KEEP, BACK = (1200, 1000), (1000, 1000), (800, 1000)  # T_train, T_rollout


def pool_of(up: bool = True, **rules: Any) -> HybridPool:
    pool = HybridPool(PoolRules(**rules), CORE, ROLLOUT, REPLICAS)
    for gpu in HYBRID if up else ():
        assert pool.handle(MemberUp(gpu, 0), 0) == []
    return pool


class Rig:
    """A pool with its clock, and what it has ordered."""

    def __init__(self, **rules: Any) -> None:
        self.pool = pool_of(**rules)
        self.now, self.step, self.version = 0, -1, 0
        self.orders: list[AnyOrder] = []
        self._seen = 0

    def new(self) -> list[AnyOrder]:
        """What was ordered since this was asked last."""
        new, self._seen = self.orders[self._seen :], len(self.orders)
        return new

    def tell(self, fact: AnyFact) -> list[AnyOrder]:
        new = self.pool.handle(fact, self.now)
        self.orders += new
        return new

    def tick(self, after_s: int) -> list[AnyOrder]:
        self.now += after_s * S
        new = self.pool.tick(self.now)
        self.orders += new
        return new

    def begin(self) -> StepPlan:
        self.step += 1
        plan = self.tell(StepBegins(self.step, self.step))[-1]
        assert isinstance(plan, StepPlan)
        return plan

    def signal(self, times: tuple[int, int] = TRAIN, **more: Any) -> list[AnyOrder]:
        self.version += 1
        return self.tell(Signal(self.version, self.step, *times, **more))

    def done(self, replica: int, stage: R) -> list[AnyOrder]:
        generation = self.pool.generation(replica)
        return [order for gpu in REPLICAS[replica]
                for order in self.tell(MemberDone(gpu, 0, generation, stage))]

    def to(self, replica: int, state: R) -> None:
        """Brings a replica that was asked to join as far as this."""
        while self.pool.state(replica) in ASKED[:3] and self.pool.state(replica) is not state:
            self.done(replica, self.pool.state(replica))
        if self.pool.state(replica) is not state:
            self.begin()
        if state is R.LEAVING:
            self.tell(JoinCancelled(replica, self.pool.generation(replica)))
        assert self.pool.state(replica) is state


# one way in and out


def test_a_replica_joins_as_a_whole_and_goes_back() -> None:
    rig = Rig(reserved_gpus=6)
    assert rig.begin() == StepPlan(0, 0, 0)
    assert rig.signal() == [Ask(6, 0, 0, 1, R.REQUESTED, 0), Ask(7, 0, 0, 1, R.REQUESTED, 0)]
    assert rig.pool.roles()[6] is Role.HYBRID_JOINING
    assert rig.tell(MemberDone(6, 0, 1, R.REQUESTED)) == []  # not the whole
    assert rig.tell(MemberDone(7, 0, 1, R.REQUESTED)) == [
        Ask(6, 0, 0, 1, R.FETCHING_STATE, 0), Ask(7, 0, 0, 1, R.FETCHING_STATE, 0)]
    rig.to(0, R.ZERO_SYNC)
    assert rig.begin() == StepPlan(1, 1, 0, (), (Seat(0, 1, 0),))  # it follows with zero
    rig.to(0, R.ACTIVATING)
    assert rig.begin() == StepPlan(2, 2, 1, (Seat(0, 1, 0),))
    assert rig.pool.roles()[7] is Role.HYBRID_TRAINING
    assert rig.begin().epoch == 1
    assert rig.signal(BACK) == []  # to the end of the step
    assert rig.pool.state(0) is R.LEAVING and rig.pool.roles()[7] is Role.HYBRID_TRAINING
    assert rig.begin() == StepPlan(4, 4, 2)
    assert rig.pool.roles()[7] is Role.HYBRID_JOINING
    rig.done(0, R.RETURNING)
    assert rig.pool.roles()[7] is Role.HYBRID_ROLLOUT
    told = [order.end for order in rig.orders if isinstance(order, Settled)]
    assert told == [End.JOINED, End.LEFT]
    assert rig.pool.core_training == CORE


def test_each_is_added_to_the_core_that_has_fewest() -> None:
    rig = Rig()
    rig.begin()
    rig.signal()
    for replica in range(3):
        rig.to(replica, R.ACTIVATING)
    assert [seat.core for seat in rig.begin().counting] == [0, 1, 0]


@pytest.mark.parametrize("state", [R.REQUESTED, R.FETCHING_STATE, R.ZERO_SYNC, R.ACTIVATING,
                                   R.ACTIVE, R.LEAVING])
@pytest.mark.parametrize("how", ["lost", "failed", "late", "cancelled"])
def test_whatever_goes_wrong_brings_all_of_it_back(state: R, how: str) -> None:
    rig = Rig(reserved_gpus=6, boundary_timeout_ns=200 * S)
    rig.begin()
    rig.signal()
    rig.to(0, state)
    if how == "late" and state is R.ACTIVE:
        assert rig.pool.next_deadline() is None  # it may train for as long as it is wanted
        return
    if how == "cancelled" and state in (R.ACTIVE, R.LEAVING):
        rig.tell(JoinCancelled(0, 1))
        rig.begin()
    told = {"lost": lambda: rig.tell(MemberLost(7, 0)),
            "failed": lambda: rig.tell(MemberFailed(7, 0, 1, "no room")),
            "late": lambda: rig.tick(200),
            "cancelled": lambda: rig.tell(JoinCancelled(0, 1))}[how]()
    assert rig.pool.state(0) is R.RETURNING
    counted = state not in (R.REQUESTED, R.FETCHING_STATE)
    assert any(isinstance(order, Expel) for order in rig.orders) == counted
    asked = [o.member for o in told if isinstance(o, Ask)]
    if not (how == "cancelled" and state in (R.ACTIVE, R.LEAVING)):
        assert asked == ([6] if how == "lost" else [6, 7])
    rig.done(0, R.RETURNING)
    last = next(o for o in reversed(rig.orders) if isinstance(o, Settled))
    if how == "lost":
        assert last.end is End.LOST and rig.pool.state(0) is R.LOST
        assert (rig.pool.roles()[6], rig.pool.roles()[7]) == (Role.HYBRID_ROLLOUT, Role.LOST)
        rig.tell(MemberUp(7, 0))  # of a life that is over
        assert rig.pool.state(0) is R.LOST
        rig.tell(MemberUp(7, 1))
    else:
        assert last.end is (End.LEFT if state in (R.ACTIVE, R.LEAVING) else End.ROLLED_BACK)
    assert rig.pool.state(0) is R.ROLLOUT
    assert rig.begin().counting == ()


def test_one_that_does_not_come_back_is_ended_and_told_lost() -> None:
    rig = Rig(reserved_gpus=6)
    rig.begin()
    rig.signal()
    rig.tick(180)
    rig.tell(MemberDone(6, 0, 1, R.RETURNING))
    assert rig.tick(179) == []
    told = rig.tick(1)
    assert told[0] == Kill(7, 0, "did not come back in time")
    assert told[1] == Settled(0, 1, End.LOST, "REQUESTED timed out waiting for 6, 7")
    assert rig.pool.roles()[7] is Role.LOST


def test_a_failed_join_is_not_tried_again_at_once() -> None:
    rig = Rig(reserved_gpus=6, retry_steps=3)
    rig.begin()
    rig.signal()
    assert rig.pool.generation(0) == 1
    rig.tell(MemberFailed(6, 0, 1, "no"))
    rig.done(0, R.RETURNING)
    assert rig.pool.generation(1) == 1  # another one is as good
    tried = []
    for _ in range(5):
        rig.tell(MemberFailed(8, 0, rig.pool.generation(1), "no"))
        rig.tell(MemberFailed(10, 0, rig.pool.generation(2), "no"))
        for replica in (1, 2):
            rig.done(replica, R.RETURNING)
        rig.begin()
        tried.append(rig.pool.generation(0))
    assert tried == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("state", [R.REQUESTED, R.FETCHING_STATE, R.ZERO_SYNC, R.ACTIVATING,
                                   R.ACTIVE, R.LEAVING, R.RETURNING])
def test_a_member_whose_new_life_is_heard_of_before_its_death(state: R) -> None:
    rig = Rig(reserved_gpus=6)
    rig.begin()
    rig.signal()
    rig.to(0, R.ACTIVE if state is R.RETURNING else state)
    if state is R.RETURNING:
        rig.tell(MemberFailed(6, 0, 1, "no"))
    rig.tell(MemberUp(7, 1))
    assert rig.pool.state(0) is R.RETURNING
    rig.tell(MemberLost(7, 0))
    rig.tell(MemberDone(7, 0, 1, R.RETURNING))
    rig.tell(MemberDone(6, 0, 1, R.RETURNING))  # the other one serves since it came
    assert rig.pool.state(0) is R.ROLLOUT and rig.pool.roles()[7] is Role.HYBRID_ROLLOUT


def test_one_that_was_cancelled_leaves_even_if_it_is_wanted() -> None:
    rig = Rig(retry_steps=0)
    for gpu in (8, 10):  # nobody else could join
        rig.tell(MemberLost(gpu, 0))
    rig.begin()
    rig.signal()
    rig.to(0, R.ACTIVE)
    rig.tell(JoinCancelled(0, 1))
    rig.begin()
    assert rig.pool.state(0) is R.RETURNING
    rig.done(0, R.RETURNING)
    assert rig.pool.state(0) is R.REQUESTED and rig.pool.generation(0) == 2
    rig.tell(MemberFailed(6, 0, 2, "no"))
    rig.done(0, R.RETURNING)
    told = [(o.generation, o.end) for o in rig.orders if isinstance(o, Settled)]
    assert told == [(1, End.JOINED), (1, End.LEFT), (2, End.ROLLED_BACK)]


@pytest.mark.parametrize("state", list(R))
def test_a_stale_word_changes_nothing_in_any_state(state: R) -> None:
    rig = Rig(retry_steps=0)
    for gpu in (8, 10):
        rig.tell(MemberLost(gpu, 0))
    rig.begin()
    rig.signal()
    rig.tell(MemberFailed(6, 0, 1, "no"))  # the first join is over
    rig.done(0, R.RETURNING)
    rig.begin()
    assert rig.pool.generation(0) == 2
    if state in (R.ROLLOUT, R.RETURNING, R.LOST):
        rig.signal(BACK)
        rig.done(0, R.RETURNING) if state is not R.RETURNING else None
        rig.tell(MemberLost(6, 0)) if state is R.LOST else None
    else:
        rig.to(0, state)
    assert rig.pool.state(0) is state
    words: list[AnyFact] = [
        MemberDone(7, life, generation, stage) for life in (0, 1, 2) for generation in (1, 2, 3)
        for stage in R if (life, generation, stage) != (0, 2, state)]
    words += [MemberFailed(7, life, generation, "no") for life in (0, 1) for generation in (1, 2, 3)
              if (life, generation) != (0, 2)]
    words += [JoinCancelled(0, 1), JoinCancelled(0, 3), MemberLost(7, 1), MemberUp(7, 0),
              StepBegins(rig.step, 9), Signal(rig.version, 9, *BACK)]
    before, ignored = picture(rig.pool), rig.pool.ignored
    for word in words:
        assert rig.tell(word) == [] and picture(rig.pool) == before, word
    assert rig.pool.ignored == ignored + len(words)


# the signal


def wanted(*signals: tuple[int, Signal], spare: int = 3, **rules: Any) -> list[int]:
    wish = Wish(PoolRules(**rules))
    told = []
    for step, signal in signals:
        wish.hear(signal)
        told.append(wish.settle(step, spare))
    return told


def test_the_signal_is_the_reference_s() -> None:
    def at(step: int, ratio: int, pressure: int = 0, planned: int = 0) -> tuple[int, Signal]:
        return step, Signal(step, step, ratio, 1000, pressure, planned)

    assert wanted(at(0, 1149), at(1, 1150), at(2, 1149), at(3, 901), at(4, 900), at(5, 1000)) == [
        0, 3, 3, 3, 0, 0]
    assert wanted(at(0, 2000, 799), at(1, 2000, 800), at(2, 2000)) == [3, 0, 3]
    assert wanted(at(0, 0, 0, 2), at(1, 0, 0, 9), at(2, 0, 800, 2)) == [2, 3, 0]
    assert wanted((0, Signal(1, 0, 2000, 1000)), (20, Signal(1, 20, 0, 1000)),
                  (21, Signal(0, 21, 2000, 1000))) == [3, 3, 0]  # not newer; expired
    assert wanted((0, Signal(1, 0, 5, 0)), (1, Signal(2, 1, 0, 0))) == [3, 3]
    assert wanted(at(0, 1200), at(1, 800), at(2, 800), cooldown_steps=2) == [3, 3, 0]
    assert wanted(at(0, 1200), at(1, 800, 900), cooldown_steps=2) == [3, 0]


def test_gpus_that_rollout_keeps_are_not_lent() -> None:
    for reserved, lent in ((0, 3), (2, 3), (3, 2), (4, 2), (6, 1), (7, 0), (99, 0)):
        rig = Rig(reserved_gpus=reserved)
        rig.begin()
        rig.signal()
        assert [rig.pool.generation(n) for n in range(3)] == [1] * lent + [0] * (3 - lent)


def test_full_queues_of_rollout_bring_all_back_those_on_their_way_first() -> None:
    rig = Rig()
    rig.begin()
    rig.signal()
    rig.to(0, R.ACTIVE)
    rig.signal(TRAIN, planned=1)
    assert rig.pool.state(0) is R.ACTIVE and rig.pool.state(1) is R.RETURNING
    rig.signal(TRAIN, pressure_permille=800)
    assert rig.pool.state(0) is R.LEAVING
    rig.begin()
    assert rig.pool.state(0) is R.RETURNING


def test_one_that_was_about_to_leave_stays_when_it_is_wanted_after_all() -> None:
    rig = Rig(reserved_gpus=6, cooldown_steps=0)
    rig.begin()
    rig.signal()
    rig.to(0, R.ACTIVE)
    epoch = rig.begin().epoch
    rig.signal(BACK)
    rig.signal(TRAIN)
    assert rig.pool.state(0) is R.ACTIVE and rig.begin().epoch == epoch


@pytest.mark.parametrize(("told", "why"), [
    ({"ttl_steps": 0}, "ttl_steps"), ({"reserved_gpus": -1}, "reserved_gpus"),
    ({"join_permille": 900}, "come and go each step"), ({"stage_timeout_ns": 0}, "stage_timeout")])
def test_a_wrong_rule_is_named(told: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        PoolRules(**told)


@pytest.mark.parametrize(("core", "rollout", "replicas", "why"), [
    (((0,), (0,)), (), (), "GPU 0 is named twice"), (((0,),), (1,), ((1,),), "GPU 1"),
    (((0, 1),), (), ((2,),), "not a complete replica"), ((), (), (), "at least one core"),
    (((0, 1), (2,)), (), (), "as many")])
def test_a_gpu_has_one_place(core: Any, rollout: Any, replicas: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        HybridPool(PoolRules(), core, rollout, replicas)


# any history of facts, sensible or not


class Witness:
    """Holds every order and state of a pool against the laws."""

    def __init__(self, pool: HybridPool) -> None:
        self.pool = pool
        self.ends: dict[tuple[int, int], list[End]] = {}
        self.asked: dict[tuple[int, int], None] = {}
        self.plan: StepPlan | None = None
        self.expelled: set[tuple[int, int]] = set()

    def see(self, orders: list[AnyOrder]) -> None:
        for order in orders:
            match order:
                case Ask(member=member, replica=n, generation=generation, core=core):
                    assert member in REPLICAS[n] and core < len(CORE)
                    self.asked[(n, generation)] = None
                case Kill(member=member):
                    assert member in HYBRID
                case Expel(replica=n, generation=generation):
                    self.expelled.add((n, generation))
                case Settled(replica=n, generation=generation, end=end):
                    self.ends.setdefault((n, generation), []).append(end)
                case StepPlan():
                    self.plan_of(order)
        self.state()

    def plan_of(self, plan: StepPlan) -> None:
        before, self.plan = self.plan, plan
        if before is not None:
            assert plan.step > before.step
            assert (plan.epoch != before.epoch) == (plan.counting != before.counting)
            assert plan.epoch >= before.epoch
        assert [s.replica for s in plan.counting] == [
            n for n in range(3) if self.pool.state(n) is R.ACTIVE]
        for seat in (*plan.counting, *plan.following):
            assert seat.generation == self.pool.generation(seat.replica)
            assert (seat.replica, seat.generation) not in self.expelled  # never one of the dead

    def state(self) -> None:
        roles = self.pool.roles()
        assert sorted(roles) == list(range(12))
        assert [roles[g] for g in range(6)] == [Role.CORE_TRAINING] * 4 + [Role.CORE_ROLLOUT] * 2
        assert self.pool.core_training == CORE
        for n, gpus in enumerate(REPLICAS):  # all that live are of one role
            assert len({roles[g] for g in gpus} - {Role.LOST}) <= 1
            if self.pool.state(n) not in (R.LOST, R.RETURNING):
                assert Role.LOST not in {roles[g] for g in gpus}
            if self.pool.state(n) in (R.ACTIVE, R.LEAVING):
                key = (n, self.pool.generation(n))
                assert self.ends[key] == [End.JOINED]

    def all_ended(self) -> None:
        for key in self.asked:
            ends = self.ends[key]
            assert ends in ([End.ROLLED_BACK], [End.LOST], [End.JOINED, End.LEFT],
                            [End.JOINED, End.LOST]), (key, ends)


def picture(pool: HybridPool) -> str:
    return repr((pool._replicas, pool._members, pool._counting, pool._step, pool.epoch,
                 pool._wish.wanted, pool._wish._signal))


def stale(pool: HybridPool, fact: AnyFact) -> bool:
    """Whether it speaks of another life, generation, stage, step or version than is going on."""
    if isinstance(fact, StepBegins):
        return fact.step <= pool._step
    if isinstance(fact, Signal):
        last = pool._wish._signal
        return last is not None and fact.version <= last.version
    if isinstance(fact, JoinCancelled):
        return not 0 <= fact.replica < 3 or fact.generation != pool.generation(fact.replica)
    if fact.member not in HYBRID:
        return True
    member = pool._members[fact.member]
    if isinstance(fact, MemberUp):
        return fact.life <= member.life
    if not member.alive or fact.life != member.life:
        return True
    n = next(n for n, gpus in enumerate(REPLICAS) if fact.member in gpus)
    if isinstance(fact, (MemberDone, MemberFailed)) and fact.generation != pool.generation(n):
        return True
    return isinstance(fact, MemberDone) and fact.stage is not pool.state(n)


MEMBER = st.sampled_from([*HYBRID, 0, 99])
SMALL = st.integers(0, 3)
FACTS = st.one_of(
    st.builds(MemberDone, MEMBER, SMALL, SMALL, st.sampled_from(ASKED)),
    st.builds(MemberUp, MEMBER, SMALL), st.builds(MemberLost, MEMBER, SMALL),
    st.builds(MemberFailed, MEMBER, SMALL, SMALL, st.just("no")),
    st.builds(JoinCancelled, st.integers(-1, 3), SMALL),
    st.builds(StepBegins, st.integers(0, 30), SMALL),
    st.builds(Signal, st.integers(0, 30), st.integers(0, 30), st.integers(0, 1300),
              st.just(1000), st.sampled_from([0, 0, 0, 900]), st.sampled_from([0, 0, 1, 2, 9])))
# what brings histories on: the next boundary, a signal, all of a replica's words, time
MOVES = st.one_of(st.just("begin"), st.sampled_from(["train", "back"]), st.integers(0, 2),
                  st.builds(lambda s: ("tick", s), st.sampled_from([1, 100, 200, 4000])), FACTS)


@settings(max_examples=300, deadline=None)
@given(st.lists(MOVES, max_size=60), st.integers(0, 6))
def test_no_history_breaks_a_law(history: list[Any], reserved: int) -> None:
    rig = Rig(reserved_gpus=reserved, retry_steps=1)
    witness = Witness(rig.pool)
    for told in history:
        if told == "begin":
            rig.step = max(rig.step, rig.pool._step)
            rig.begin()
        elif told in ("train", "back"):
            rig.version = max(rig.version, 30)
            rig.signal(TRAIN if told == "train" else BACK)
        elif isinstance(told, int):
            stage = rig.pool.state(told)
            for gpu in REPLICAS[told]:
                life = rig.pool._members[gpu].life
                rig.tell(MemberDone(gpu, life, rig.pool.generation(told), stage))
        elif isinstance(told, tuple):
            rig.tick(told[1])
        else:
            before, ignored, old = picture(rig.pool), rig.pool.ignored, stale(rig.pool, told)
            orders = rig.tell(told)
            if old or rig.pool.ignored > ignored:  # stale or senseless: nothing has changed
                assert rig.pool.ignored == ignored + 1
                assert picture(rig.pool) == before and orders == []
        witness.see(rig.new())
    for _ in range(3):  # time goes on, nobody says anything: every join ends
        rig.version = 99 + rig.version
        rig.signal(TRAIN, pressure_permille=1000)
        rig.tick(4000)
    assert {rig.pool.state(n) for n in range(3)} <= {R.ROLLOUT, R.LOST} | {R.ACTIVE, R.LEAVING}
    rig.step = max(rig.step, rig.pool._step)
    rig.begin()
    for _ in range(2):
        rig.tick(4000)
    witness.see(rig.new())
    witness.all_ended()
    assert rig.pool.next_deadline() is None


# members as actors of their own


class Actor:
    """A member from outside: what its GPU is really used for. It does what it was asked in the
    order in which the words arrive, and dies without a word."""

    def __init__(self, gpu: int) -> None:
        self.gpu, self.life, self.alive = gpu, 0, True
        self.uses = "rollout"
        self.inbox: deque[AnyOrder] = deque()
        self.outbox: deque[AnyFact] = deque([MemberUp(gpu, 0)])

    def work(self) -> None:
        order = self.inbox.popleft()
        if not self.alive or not isinstance(order, Ask) or order.life != self.life:
            return
        uses = {R.REQUESTED: "nothing", R.RETURNING: "rollout"}.get(order.stage, "training")
        assert (self.uses, uses) != ("rollout", "training"), "asked to train while it serves"
        self.uses = uses
        self.outbox.append(MemberDone(self.gpu, self.life, order.generation, order.stage))

    def die(self) -> None:
        if self.alive:
            self.alive, self.uses = False, "nothing"
            self.inbox.clear()
            self.outbox.append(MemberLost(self.gpu, self.life))

    def rise(self) -> None:
        if not self.alive:
            self.life, self.alive, self.uses = self.life + 1, True, "rollout"
            self.outbox.append(MemberUp(self.gpu, self.life))


STEPS = st.one_of(
    st.tuples(st.sampled_from(["work", "work", "word", "word", "die", "rise"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["all", "begin", "train", "train", "back"]), st.just(0)),
    st.tuples(st.just("tick"), st.sampled_from([1, 90, 200])))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=120))
def test_no_gpu_serves_and_trains_at_once_whatever_the_channels_do(steps: list[Any]) -> None:
    rig = Rig.__new__(Rig)
    rig.pool = pool_of(up=False, retry_steps=0)
    rig.now, rig.step, rig.version, rig.orders, rig._seen = 0, -1, 0, [], 0
    actors = [Actor(gpu) for gpu in HYBRID]
    by_gpu = {actor.gpu: actor for actor in actors}
    witness = Witness(rig.pool)

    def settle() -> None:
        orders = rig.new()
        witness.see(orders)
        for order in orders:
            if isinstance(order, Kill):
                by_gpu[order.member].die()
            elif isinstance(order, Ask):
                by_gpu[order.member].inbox.append(order)
        for gpu, role in rig.pool.roles().items():
            if gpu in by_gpu and by_gpu[gpu].uses == "training":
                assert role in (Role.HYBRID_JOINING, Role.HYBRID_TRAINING, Role.LOST)
            if role is Role.HYBRID_TRAINING and by_gpu[gpu].alive:
                assert by_gpu[gpu].uses == "training"

    def everything() -> None:
        while any((a.inbox and a.alive) or a.outbox for a in actors):
            for actor in actors:
                while actor.inbox:
                    actor.work()
                while actor.outbox:
                    rig.tell(actor.outbox.popleft())
                    settle()

    for what, n in steps:
        actor = actors[n % len(actors)]
        if what == "work" and actor.inbox:
            actor.work()
        elif what == "word" and actor.outbox:
            rig.tell(actor.outbox.popleft())
        elif what == "die":
            actor.die()
        elif what == "rise":
            actor.rise()
        elif what == "begin":
            rig.begin()
        elif what in ("train", "back"):
            rig.signal(TRAIN if what == "train" else BACK)
        elif what == "tick":
            rig.tick(n)
        elif what == "all":
            everything()
        settle()
    for actor in actors:
        actor.rise()
    everything()
    rig.signal(BACK, pressure_permille=1000)
    for _ in range(3):
        everything()
        rig.begin()
        settle()
    everything()
    # all that ever died rose again: all are rollout workers, and nothing is left open
    assert [rig.pool.state(n) for n in range(3)] == [R.ROLLOUT] * 3
    assert {actor.uses for actor in actors if actor.alive} == {"rollout"}
    witness.all_ended()
