"""When an action that waits is cancelled, what it held back starts at once."""

from __future__ import annotations

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.scheduler.placement.minimum_residency import OVERDUE_NS

SECOND = 10**9


@pytest.mark.parametrize("placer", ["elastic", "elastic:3", "fcfs:8", "paper"])
@pytest.mark.parametrize("session", [False, True])
def test_actions_behind_a_wide_one_start_when_it_is_cancelled(placer: str, session: bool) -> None:
    world = World(placer, now=SECOND)
    world.node(8)
    home = 0
    if session:
        home = world.session()
        world.plan()
        world.happen(ev.SessionReady(world.now, home))
    long = Profile(400 * SECOND, 0)
    running = world.submit(4, resizable=False, profile=long)
    assert started(world.plan()) == [running]
    wide = world.submit(8, session=home, resizable=False, profile=Profile(SECOND, 0))
    world.plan()
    world.now += 200 * SECOND  # so that it lets no other one pass
    behind = world.submit(2, resizable=False, profile=long)
    assert started(world.plan()) == []
    world.happen(ev.ActionCancelled(world.now, wide, "by its client"))
    assert started(world.plan()) == [behind]


def test_calls_follow_again_on_a_block_whose_starved_call_is_cancelled() -> None:
    world = World("elastic", now=SECOND)
    world.node(1, gpus=2, ahead=16)
    world.happen(ev.ServiceDeclared(world.now, ServiceSpec("judge", SECOND, backend="fake",
                                                           batch=4)))
    for _ in range(20):
        world.submit(1, key="service:judge", profile=Profile(2 * SECOND, 0))
    world.plan()
    wide = world.submit(2, key="service:judge", profile=Profile(2 * SECOND, 0))
    world.now += 20 * OVERDUE_NS
    ended = min(world.ledger.leases.values(), key=lambda lease: lease.lease).action
    world.finish(ended)
    world.plan()
    assert world.scheduler.state.drained, "the block is booked for the wide call"
    before = len(world.ledger.leases)
    world.happen(ev.ActionCancelled(world.now, wide, "by its client"))
    world.plan()
    assert not world.scheduler.state.drained
    assert len(world.ledger.leases) > before
