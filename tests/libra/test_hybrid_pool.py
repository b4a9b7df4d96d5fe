"""The hybrid pool step by step: joining and leaving, failures, stale events, the pipeline
signal."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.hybrid_pool_rig import BACK, CORE, TRAIN, Rig, S, picture

from tangram_hpc.domain.hybrid import (
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
from tangram_hpc.domain.hybrid import ReplicaState as R
from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.hybrid.hybrid_pool import HybridPool
from tangram_hpc.libra.hybrid.hybrid_signal import PoolRules, ReplicaTarget

# one way in and out


def test_all_members_of_a_replica_join_together_and_return_to_rollout() -> None:
    rig = Rig(reserved_gpus=6)
    assert rig.begin() == StepPlan(0, 0, 0)
    assert rig.signal() == [StageOrder(6, 0, 0, 1, R.REQUESTED, 0),
                            StageOrder(7, 0, 0, 1, R.REQUESTED, 0)]
    assert rig.pool.roles()[6] is Role.HYBRID_JOINING
    assert rig.tell(MemberDone(6, 0, 1, R.REQUESTED)) == []  # not the whole
    assert rig.tell(MemberDone(7, 0, 1, R.REQUESTED)) == [
        StageOrder(6, 0, 0, 1, R.FETCHING_STATE, 0), StageOrder(7, 0, 0, 1, R.FETCHING_STATE, 0)]
    rig.to(0, R.ZERO_SYNC)
    assert rig.begin() == StepPlan(1, 1, 0, (), (ContributorId(0, 1, 0),))  # it follows with zero
    rig.to(0, R.ACTIVATING)
    assert rig.begin() == StepPlan(2, 2, 1, (ContributorId(0, 1, 0),))
    assert rig.pool.roles()[7] is Role.HYBRID_TRAINING
    assert rig.begin().epoch == 1
    assert rig.signal(BACK) == []  # to the end of the step
    assert rig.pool.state(0) is R.LEAVING and rig.pool.roles()[7] is Role.HYBRID_TRAINING
    assert rig.begin() == StepPlan(4, 4, 2)
    assert rig.pool.roles()[7] is Role.HYBRID_JOINING
    rig.done(0, R.RETURNING)
    assert rig.pool.roles()[7] is Role.HYBRID_ROLLOUT
    told = [order.end for order in rig.orders if isinstance(order, JoinEnded)]
    assert told == [JoinOutcome.JOINED, JoinOutcome.LEFT]
    assert rig.pool.core_training == CORE


def test_a_replica_joins_the_core_with_the_fewest_contributors() -> None:
    rig = Rig()
    rig.begin()
    rig.signal()
    for replica in range(3):
        rig.to(replica, R.ACTIVATING)
    assert [contributor.core for contributor in rig.begin().counting] == [0, 1, 0]


@pytest.mark.parametrize("state", [R.REQUESTED, R.FETCHING_STATE, R.ZERO_SYNC, R.ACTIVATING,
                                   R.ACTIVE, R.LEAVING])
@pytest.mark.parametrize("how", ["lost", "failed", "late", "cancelled"])
def test_any_failure_of_one_member_returns_the_whole_replica_to_rollout(state: R, how: str) -> None:
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
    assert any(isinstance(order, EvictReplica) for order in rig.orders) == counted
    asked = [o.member for o in told if isinstance(o, StageOrder)]
    if not (how == "cancelled" and state in (R.ACTIVE, R.LEAVING)):
        assert asked == ([6] if how == "lost" else [6, 7])
    rig.done(0, R.RETURNING)
    last = next(o for o in reversed(rig.orders) if isinstance(o, JoinEnded))
    if how == "lost":
        assert last.end is JoinOutcome.LOST and rig.pool.state(0) is R.LOST
        assert (rig.pool.roles()[6], rig.pool.roles()[7]) == (Role.HYBRID_ROLLOUT, Role.LOST)
        rig.tell(MemberUp(7, 0))  # of an incarnation that is over
        assert rig.pool.state(0) is R.LOST
        rig.tell(MemberUp(7, 1))
    else:
        assert last.end is (JoinOutcome.LEFT if state in (R.ACTIVE, R.LEAVING)
                            else JoinOutcome.ROLLED_BACK)
    assert rig.pool.state(0) is R.ROLLOUT
    assert rig.begin().counting == ()


def test_a_member_that_does_not_return_in_time_is_killed_and_lost() -> None:
    rig = Rig(reserved_gpus=6)
    rig.begin()
    rig.signal()
    rig.tick(180)
    rig.tell(MemberDone(6, 0, 1, R.RETURNING))
    assert rig.tick(179) == []
    told = rig.tick(1)
    assert told[0] == KillMember(7, 0, "did not come back in time")
    assert told[1] == JoinEnded(0, 1, JoinOutcome.LOST, "REQUESTED timed out waiting for 6, 7")
    assert rig.pool.roles()[7] is Role.LOST


def test_a_failed_join_is_retried_only_after_retry_steps() -> None:
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
def test_a_new_incarnation_may_be_reported_before_the_old_ones_death(state: R) -> None:
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


def test_a_cancelled_replica_leaves_although_training_wants_it() -> None:
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
    told = [(o.generation, o.end) for o in rig.orders if isinstance(o, JoinEnded)]
    assert told == [(1, JoinOutcome.JOINED), (1, JoinOutcome.LEFT), (2, JoinOutcome.ROLLED_BACK)]


@pytest.mark.parametrize("state", list(R))
def test_a_stale_event_changes_nothing_in_any_state(state: R) -> None:
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
    words: list[AnyPoolEvent] = [
        MemberDone(7, incarnation, generation, stage) for incarnation in (0, 1, 2)
        for generation in (1, 2, 3)
        for stage in R if (incarnation, generation, stage) != (0, 2, state)]
    words += [MemberFailed(7, incarnation, generation, "no") for incarnation in (0, 1)
              for generation in (1, 2, 3)
              if (incarnation, generation) != (0, 2)]
    words += [JoinCancelled(0, 1), JoinCancelled(0, 3), MemberLost(7, 1), MemberUp(7, 0),
              StepBegins(rig.step, 9), PipelineSignal(rig.version, 9, *BACK)]
    before, ignored = picture(rig.pool), rig.pool.ignored
    for word in words:
        assert rig.tell(word) == [] and picture(rig.pool) == before, word
    assert rig.pool.ignored == ignored + len(words)


# the signal


def wanted(*signals: tuple[int, PipelineSignal], spare: int = 3, **rules: Any) -> list[int]:
    target = ReplicaTarget(PoolRules(**rules))
    told = []
    for step, signal in signals:
        target.update(signal)
        told.append(target.settle(step, spare))
    return told


def test_the_pipeline_signal_gives_the_number_of_replicas_to_lend() -> None:
    def at(step: int, ratio: int, pressure: int = 0,
           planned: int = 0) -> tuple[int, PipelineSignal]:
        return step, PipelineSignal(step, step, ratio, 1000, pressure, planned)

    assert wanted(at(0, 1149), at(1, 1150), at(2, 1149), at(3, 901), at(4, 900), at(5, 1000)) == [
        0, 3, 3, 3, 0, 0]
    assert wanted(at(0, 2000, 799), at(1, 2000, 800), at(2, 2000)) == [3, 0, 3]
    assert wanted(at(0, 0, 0, 2), at(1, 0, 0, 9), at(2, 0, 800, 2)) == [2, 3, 0]
    assert wanted((0, PipelineSignal(1, 0, 2000, 1000)), (20, PipelineSignal(1, 20, 0, 1000)),
                  (21, PipelineSignal(0, 21, 2000, 1000))) == [3, 3, 0]  # not newer; expired
    assert wanted((0, PipelineSignal(1, 0, 5, 0)), (1, PipelineSignal(2, 1, 0, 0))) == [3, 3]
    assert wanted(at(0, 1200), at(1, 800), at(2, 800), cooldown_steps=2) == [3, 3, 0]
    assert wanted(at(0, 1200), at(1, 800, 900), cooldown_steps=2) == [3, 0]


def test_gpus_reserved_for_rollout_are_not_lent() -> None:
    for reserved, lent in ((0, 3), (2, 3), (3, 2), (4, 2), (6, 1), (7, 0), (99, 0)):
        rig = Rig(reserved_gpus=reserved)
        rig.begin()
        rig.signal()
        assert [rig.pool.generation(n) for n in range(3)] == [1] * lent + [0] * (3 - lent)


def test_under_queue_pressure_joining_replicas_return_before_active_ones() -> None:
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


def test_a_leaving_replica_stays_when_training_wants_it_again() -> None:
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
def test_a_wrong_pool_rule_is_refused_by_name(told: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        PoolRules(**told)


@pytest.mark.parametrize(("core", "rollout", "replicas", "why"), [
    (((0,), (0,)), (), (), "GPU 0 is named twice"), (((0,),), (1,), ((1,),), "GPU 1"),
    (((0, 1),), (), ((2,),), "a complete replica"), ((), (), (), "at least one core"),
    (((0, 1), (2,)), (), (), "the same number")])
def test_a_gpu_named_in_two_roles_is_refused(
        core: Any, rollout: Any, replicas: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        HybridPool(PoolRules(), core, rollout, replicas)
