"""Leases that still run tell the estimator that their class takes longer than those that ended."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from helpers.builders import World

from tangram_hpc.domain.action import Action, Profile
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.state.estimator import FURTHER, LOOKED, Estimator
from tangram_hpc.scheduler.state.ledger import LeaseEntry

S = 10**9


def means(works: Sequence[int], starts: Sequence[int], told: bool = True) -> list[int]:
    """The estimated mean after each end, of actions on one unit that start at these times."""
    estimator, action, found = Estimator(), Action(1, "build"), []
    events = sorted([(at, 0, n) for n, at in enumerate(starts)]
                    + [(at + work, 1, n) for n, (at, work) in
                       enumerate(zip(starts, works, strict=True))])
    for at, end, n in events:
        if not end:
            lease = LeaseEntry(n + 1, 1, 1, (n,), (), 0, 0, False, at, {}, grants=[(at, 1)])
            estimator.began(action)
            if told:
                estimator.note_running(action, lease)
        else:
            estimator.ended(action, [(1, works[n])], True, 0, n + 1, at)
            found.append(estimator.mean("cpu", "build", (1,)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_is_not_taken_for_as_short_as_its_first_ends(seed: int) -> None:
    rng = random.Random(seed)
    works = [round(20 * S * rng.lognormvariate(-0.72, 1.2)) for _ in range(200)]
    true = sum(works) / len(works)
    now, ended_only = means(works, [0] * 200), means(works, [0] * 200, told=False)
    assert ended_only[9] < 0.07 * true and ended_only[99] < 0.3 * true
    assert 0.2 * true < now[9] < true and 0.5 * true < now[99] < true
    assert now[-1] == ended_only[-1], "all have ended"


def test_actions_of_equal_length_are_not_taken_for_endless() -> None:
    at_once = means([10 * S] * 200, [n * 1000 for n in range(200)])
    in_turn = means([10 * S] * 200, [n * S // 20 for n in range(200)])  # always 200 run
    for found in (at_once, in_turn):
        assert max(found) <= 10 * S and found[-1] == pytest.approx(10 * S, rel=0.1)
    one_instant = means([10 * S] * 200, [0] * 200)  # when the first ends, nothing shows the rest
    assert max(one_instant) <= (1 + FURTHER) * 10 * S
    assert one_instant[-1] == pytest.approx(10 * S, rel=0.1)


def test_only_some_of_many_running_leases_are_looked_at() -> None:
    looked = 0

    class Counted(LeaseEntry):
        def spans(self, until: int) -> list[tuple[int, int]]:
            nonlocal looked
            looked += 1
            return super().spans(until)

    estimator, action = Estimator(), Action(1, "build")
    for n in range(2000):
        estimator.began(action)
        lease = Counted(n + 1, 1, 1, (n,), (), 0, 0, False, 0, {}, grants=[(0, 1)])
        estimator.note_running(action, lease)
    estimator.ended(action, [(1, S)], True, 0, 1, S)
    assert 0 < looked <= 3 * LOOKED  # in the class, in its parent and in all actions
    assert S < estimator.mean("cpu", "build", (1,)) < 5 * S


def test_leases_that_end_in_any_way_no_longer_count() -> None:
    world = World("fcfs:1")
    world.node(2, ahead=4)
    running = [world.submit(1) for _ in range(8)]
    world.plan()
    estimator = world.ledger.estimator
    assert estimator._any.running
    told = world.submit(1, profile=Profile(S))
    world.plan()
    world.finish(running[0])
    world.finish(running[1], ActionState.TIMEOUT)
    world.plan()
    assert told not in [world.ledger.leases[n].action for n in estimator._any.running]
    assert set(estimator._any.running) == {
        n for n, lease in world.ledger.leases.items() if lease.action != told}
    world.drain()
    assert not estimator._any.running
    assert not any(each.running for each in estimator._parents.values())
    assert not any(each.sizes.running for each in estimator._classes.values())
