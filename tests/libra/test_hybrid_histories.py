"""The hybrid pool's invariants, on any history that hypothesis can generate.

The history itself is drawn, so that a failing one shrinks. The invariants are checked twice: on the
pool's own answers after every event, sensible or not, and from outside, by members that are actors
of their own behind slow, lossless channels and die at any moment.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from helpers.hybrid_pool_rig import (
    ASKED,
    BACK,
    CORE,
    HYBRID,
    REPLICAS,
    TRAIN,
    Rig,
    picture,
    pool_of,
    stale,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.domain.hybrid import (
    AnyOrder,
    AnyPoolEvent,
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
from tangram_hpc.domain.hybrid import ReplicaState as R
from tangram_hpc.libra.hybrid.hybrid_pool import HybridPool

# any history of events, sensible or not


class Witness:
    """Checks every order and state of a pool against the invariants."""

    def __init__(self, pool: HybridPool) -> None:
        self.pool = pool
        self.ends: dict[tuple[int, int], list[JoinOutcome]] = {}
        self.asked: dict[tuple[int, int], None] = {}
        self.plan: StepPlan | None = None
        self.evicted: set[tuple[int, int]] = set()

    def see(self, orders: list[AnyOrder]) -> None:
        for order in orders:
            match order:
                case StageOrder(member=member, replica=n, generation=generation, core=core):
                    assert member in REPLICAS[n] and core < len(CORE)
                    self.asked[(n, generation)] = None
                case KillMember(member=member):
                    assert member in HYBRID
                case EvictReplica(replica=n, generation=generation):
                    self.evicted.add((n, generation))
                case JoinEnded(replica=n, generation=generation, end=end):
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
        for contributor in (*plan.counting, *plan.following):
            assert contributor.generation == self.pool.generation(contributor.replica)
            key = (contributor.replica, contributor.generation)
            assert key not in self.evicted  # never one of the dead

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
                assert self.ends[key] == [JoinOutcome.JOINED]

    def all_ended(self) -> None:
        for key in self.asked:
            ends = self.ends[key]
            assert ends in ([JoinOutcome.ROLLED_BACK], [JoinOutcome.LOST],
                            [JoinOutcome.JOINED, JoinOutcome.LEFT],
                            [JoinOutcome.JOINED, JoinOutcome.LOST]), (key, ends)


MEMBER = st.sampled_from([*HYBRID, 0, 99])
SMALL = st.integers(0, 3)
EVENTS = st.one_of(
    st.builds(MemberDone, MEMBER, SMALL, SMALL, st.sampled_from(ASKED)),
    st.builds(MemberUp, MEMBER, SMALL), st.builds(MemberLost, MEMBER, SMALL),
    st.builds(MemberFailed, MEMBER, SMALL, SMALL, st.just("no")),
    st.builds(JoinCancelled, st.integers(-1, 3), SMALL),
    st.builds(StepBegins, st.integers(0, 30), SMALL),
    st.builds(PipelineSignal, st.integers(0, 30), st.integers(0, 30), st.integers(0, 1300),
              st.just(1000), st.sampled_from([0, 0, 0, 900]), st.sampled_from([0, 0, 1, 2, 9])))
# what brings histories on: the next boundary, a signal, all of a replica's words, time
MOVES = st.one_of(st.just("begin"), st.sampled_from(["train", "back"]), st.integers(0, 2),
                  st.builds(lambda s: ("tick", s), st.sampled_from([1, 100, 200, 4000])), EVENTS)


@settings(max_examples=300, deadline=None)
@given(st.lists(MOVES, max_size=60), st.integers(0, 6))
def test_no_history_violates_an_invariant(history: list[Any], reserved: int) -> None:
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
                incarnation = rig.pool._members[gpu].incarnation
                rig.tell(MemberDone(gpu, incarnation, rig.pool.generation(told), stage))
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
    """A member from outside: what its GPU is really used for.

    It does what it was asked in the order in which messages arrive, and dies without a message.
    """

    def __init__(self, gpu: int) -> None:
        self.gpu, self.incarnation, self.alive = gpu, 0, True
        self.uses = "rollout"
        self.inbox: deque[AnyOrder] = deque()
        self.outbox: deque[AnyPoolEvent] = deque([MemberUp(gpu, 0)])

    def work(self) -> None:
        order = self.inbox.popleft()
        if (not self.alive or not isinstance(order, StageOrder)
            or order.incarnation != self.incarnation):
            return
        uses = {R.REQUESTED: "nothing", R.RETURNING: "rollout"}.get(order.stage, "training")
        assert (self.uses, uses) != ("rollout", "training"), "asked to train while it serves"
        self.uses = uses
        self.outbox.append(MemberDone(self.gpu, self.incarnation, order.generation, order.stage))

    def die(self) -> None:
        if self.alive:
            self.alive, self.uses = False, "nothing"
            self.inbox.clear()
            self.outbox.append(MemberLost(self.gpu, self.incarnation))

    def rise(self) -> None:
        if not self.alive:
            self.incarnation, self.alive, self.uses = self.incarnation + 1, True, "rollout"
            self.outbox.append(MemberUp(self.gpu, self.incarnation))


STEPS = st.one_of(
    st.tuples(st.sampled_from(["work", "work", "word", "word", "die", "rise"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["all", "begin", "train", "train", "back"]), st.just(0)),
    st.tuples(st.just("tick"), st.sampled_from([1, 90, 200])))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=120))
def test_no_gpu_serves_and_trains_at_once_under_delays_and_deaths(steps: list[Any]) -> None:
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
            if isinstance(order, KillMember):
                by_gpu[order.member].die()
            elif isinstance(order, StageOrder):
                by_gpu[order.member].inbox.append(order)
        for gpu, role in rig.pool.roles().items():
            if gpu in by_gpu and by_gpu[gpu].uses == "training":
                assert role in (Role.HYBRID_JOINING, Role.HYBRID_TRAINING, Role.LOST)
            # one that died and rose before the news of it came is another incarnation than is meant
            same = gpu in by_gpu and (
                by_gpu[gpu].incarnation == rig.pool._members[gpu].incarnation)
            if role is Role.HYBRID_TRAINING and same and by_gpu[gpu].alive:
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
