"""The hybrid pool: who trains is whole, fresh and wanted; a GPU has one role."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.core.hybrid_pool import (
    STAGES,
    HybridPool,
    Join,
    Leave,
    Payload,
    PoolRules,
    PoolSignal,
    Role,
    Stage,
    wanted,
)
from tangram_hpc.errors import InvalidInput

SECOND = 10**9
MORE = PoolSignal(1, 0, 200, 100, 0)  # training takes twice as long


def pool(replicas: int = 3, ranks: int = 2, reserved: int = 1, **rules: int) -> HybridPool:
    return HybridPool(PoolRules(cooldown_steps=0, **rules),
                      [(range(ranks * i, ranks * (i + 1)), ranks) for i in range(replicas)],
                      cores=2, reserved=reserved)


def activate(p: HybridPool, replica: int, generation: int) -> None:
    for stage in STAGES[1:]:
        for rank in range(p.replicas[replica].ranks):
            assert p.reached(replica, generation, rank, stage)


def joined() -> HybridPool:
    """Two of three replicas train in step 1."""
    p = pool()
    p.began_step(0)
    p.signalled(MORE)
    assert p.plan(0) == [Join(0, 1), Join(1, 1)]
    activate(p, 0, 1)
    activate(p, 1, 1)
    assert [r.id for r in p.began_step(1)] == [0, 1]
    p.check()
    return p


@pytest.mark.parametrize(("train", "rollout", "pressure", "planned", "held", "want"), [
    (1150, 1000, 0, None, 0, 4), (1149, 1000, 0, None, 0, 0), (1149, 1000, 0, None, 3, 3),
    (901, 1000, 0, None, 2, 2), (900, 1000, 0, None, 4, 0), (9999, 1000, 800, None, 4, 0),
    (9999, 1000, 799, None, 0, 4), (900, 1000, 0, 2, 0, 2), (900, 1000, 0, 9, 0, 4),
    (1150, 1000, 0, 0, 0, 4), (900, 1000, 800, 2, 2, 0)])
def test_the_signal_is_the_references(train: int, rollout: int, pressure: int,
                                      planned: int | None, held: int, want: int) -> None:
    signal = PoolSignal(1, 0, train, rollout, pressure, planned)
    assert wanted(signal, 4, held, PoolRules()) == want


def test_a_replica_joins_whole_and_from_the_next_step_on() -> None:
    p = pool()
    p.began_step(0)
    p.signalled(MORE)
    p.plan(0)
    for stage in STAGES[1:]:
        p.reached(0, 1, 0, stage)
    assert p.began_step(1) == [] and p.replicas[0].role is Role.JOINING  # one rank is not enough
    activate_rest = STAGES[1:]
    for stage in activate_rest:
        p.reached(0, 1, 1, stage)
    assert p.training() == []  # counts as zero within the step
    assert [r.id for r in p.began_step(2)] == [0] and p.epoch == 1


def test_stages_come_in_order_and_of_the_present_generation() -> None:
    p = pool()
    p.began_step(0)
    p.signalled(MORE)
    p.plan(0)
    assert not p.reached(0, 1, 0, Stage.ZERO_SYNC)
    assert not p.reached(0, 0, 0, Stage.FETCHING_STATE)
    assert not p.reached(2, 1, 0, Stage.FETCHING_STATE)  # does not join
    assert p.reached(0, 1, 0, Stage.FETCHING_STATE)
    assert not p.reached(0, 1, 0, Stage.FETCHING_STATE)


def test_any_failure_or_deadline_rolls_the_whole_replica_back() -> None:
    p = pool()
    p.began_step(0)
    p.signalled(MORE)
    p.plan(0)
    p.reached(0, 1, 0, Stage.FETCHING_STATE)
    assert p.failed(5, 0, 1) == [Leave(0, 1)] and p.failed(5, 0, 1) == []
    assert not p.reached(0, 1, 0, Stage.ZERO_SYNC)
    assert p.returned(0, 1, 0) and p.replicas[0].role is Role.LEAVING
    assert p.returned(0, 1, 1) and p.replicas[0].role is Role.ROLLOUT
    late = p.plan(180 * SECOND)
    assert Leave(1, 1) in late and Join(0, 2) in late  # another try has another generation
    p.check()


def test_one_that_never_comes_back_is_lost_until_it_does() -> None:
    p = joined()
    p.signalled(MORE._replace(version=2, train_ns=50))
    assert p.plan(0) == [Leave(1, 1), Leave(0, 1)] and p.training() == []
    p.plan(180 * SECOND)
    assert p.replicas[0].lost and p.spare() == 0
    p.check()
    for rank in (0, 1):
        p.returned(0, 1, rank)
    assert not p.replicas[0].lost and [r.id for r in p.rolling()] == [0, 2]


def test_only_fresh_gradients_of_those_that_train_count() -> None:
    p = joined()
    good = Payload(0, 1, 1, 77, p.epoch)
    assert p.accepts(good, 77)
    for stale in (good._replace(generation=0), good._replace(step=0), good._replace(epoch=1),
                  good._replace(state_version=76), good._replace(replica=2),
                  good._replace(replica=9)):
        assert not p.accepts(stale, 77)
    p.failed(0, 1, 1)
    assert not p.accepts(good, 77)  # membership changed: its sums were made for another
    assert p.accepts(good._replace(epoch=p.epoch), 77)


def test_a_signal_runs_out() -> None:
    p = joined()
    p.began_step(20)
    assert {type(o) for o in p.plan(0)} == {Leave}
    assert not p.signalled(MORE)  # not newer


def test_hysteresis_and_cooldown() -> None:
    p = HybridPool(PoolRules(cooldown_steps=3), [((0,), 1)], 1)
    p.began_step(0)
    p.signalled(MORE)
    p.plan(0)
    activate(p, 0, 1)
    p.began_step(1)
    p.signalled(PoolSignal(2, 1, 100, 100, 0))
    assert p.plan(0) == []  # between the thresholds: it stays
    p.signalled(PoolSignal(3, 1, 80, 100, 0))
    assert p.plan(0) == []  # too early
    p.began_step(4)
    assert p.plan(0) == [Leave(0, 1)]


def test_all_can_be_recalled_whatever_the_cooldown() -> None:
    p = HybridPool(PoolRules(cooldown_steps=3), [((0,), 1), ((1,), 1), ((2,), 1)], 1)
    p.began_step(0)
    p.signalled(MORE)
    p.plan(0)
    activate(p, 0, 1)
    p.began_step(1)
    assert p.recall(0) == [Leave(0, 1), Leave(1, 1), Leave(2, 1)] and p.training() == []
    assert p.recall(0) == []
    p.check()


def test_bad_pools_are_one_clear_line() -> None:
    with pytest.raises(InvalidInput, match="GPU 1 is in two"):
        HybridPool(PoolRules(), [((0, 1), 1), ((1,), 1)], 1)
    with pytest.raises(InvalidInput, match="core replica"):
        HybridPool(PoolRules(), [], 0)
    with pytest.raises(InvalidInput, match="release_ratio"):
        PoolRules(release_ratio=2000)


moves = st.lists(st.tuples(
    st.sampled_from(["step", "signal", "plan", "stage", "fail", "return", "wait"]),
    st.integers(0, 3), st.integers(0, 1), st.integers(0, 2500)), max_size=120)


@given(moves)
@settings(max_examples=100, deadline=None)
def test_no_gpu_has_two_roles_and_no_stale_gradient_counts(events: list) -> None:
    p = pool(replicas=4, ttl_steps=5)
    now, step, version = 0, 0, 0
    p.began_step(0)
    for what, replica, rank, n in events:
        one = p.replicas[replica]
        if what == "step":
            step += 1
            before = {r.id: (r.role, list(r.stages)) for r in p.replicas.values()}
            for r in p.began_step(step):
                role, stages = before[r.id]
                assert role is Role.TRAINING or stages == [Stage.ACTIVE] * 2
        elif what == "signal":
            version += 1
            assert p.signalled(PoolSignal(version, step, n, 1000, n % 1000))
        elif what == "plan":
            for order in p.plan(now):
                assert order.generation == p.replicas[order.replica].generation
        elif what == "stage" and one.stages:
            upto = STAGES.index(one.stages[rank])
            p.reached(replica, one.generation - n % 2, rank, STAGES[min(upto + 1, 4)])
        elif what == "fail":
            p.failed(now, replica, one.generation)
        elif what == "return":
            p.returned(replica, one.generation, rank)
        elif what == "wait":
            now += n * SECOND // 10
        p.check()
        trains = {g for r in p.training() for g in r.gpus}
        rolls = {g for r in p.rolling() for g in r.gpus}
        assert not trains & rolls
        for r in p.replicas.values():
            fresh = Payload(r.id, r.generation, step, 1, p.epoch)
            assert p.accepts(fresh, 1) == (r.role is Role.TRAINING)
            assert not p.accepts(fresh._replace(step=step - 1), 1)
