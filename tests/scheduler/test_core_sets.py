"""Which cores a lease gets: cores that are close to each other, the session's last cores, and large
free groups are kept whole."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.resources.cpu import affinity
from tangram_hpc.scheduler.state.core_sets import CoreSet

UNITS = tuple(range(100, 116))
GROUPS = ((4, 4, 4, 4), (8, 8))  # four caches, two NUMA domains


def free(*units: int) -> int:
    return sum(1 << unit - 100 for unit in units)


ALL = free(*UNITS)


def test_without_cache_groups_the_lowest_cores_are_taken() -> None:
    assert CoreSet(UNITS).choose(3, ALL) == ((100, 101, 102), ALL & ~0b111)


@pytest.mark.parametrize(("n", "mask", "near", "wanted"), [
    (2, ALL, (), (100, 101)),
    (2, ALL & ~free(104, 105), (), (106, 107)),  # the fullest that has room: large holes stay
    (3, ALL & ~free(104, 105), (), (100, 101, 102)),
    (2, ALL, (110,), (108, 110)),  # where it was, and beside it
    (2, ALL & ~free(108, 109, 111), (110,), (112, 113)),  # no room there: the same NUMA domain
    (2, ALL & ~free(*range(108, 115)), (110,), (100, 101)),  # nor there
    (5, ALL & ~free(100), (), (101, 102, 103, 104, 105)),  # no cache has room: one NUMA domain
    (5, ALL & ~free(100, 101, 102, 103), (), (108, 109, 110, 111, 112)),
    (12, ALL & ~free(100), (), tuple(range(101, 113))),  # none has: any
    (1, ALL, (999,), (100,)),  # of another node
    (0, ALL, (), ()),
])
def test_cores_of_one_lease_share_the_fullest_group_with_room(
        n: int, mask: int, near: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    cores, left = CoreSet(UNITS, GROUPS).choose(n, mask, near)
    assert cores == wanted and left == mask & ~free(*wanted)


@pytest.mark.parametrize("seed", range(40))
def test_every_choice_is_free_and_within_the_smallest_group_with_room(seed: int) -> None:
    rng = random.Random(seed)
    whole = CoreSet(UNITS, GROUPS)
    for _ in range(50):
        mask = rng.getrandbits(16)
        n = rng.randint(0, mask.bit_count())
        near = tuple(rng.sample(UNITS, rng.randint(0, 4)))
        cores, left = whole.choose(n, mask, near)
        assert len(set(cores)) == n and free(*cores) & ~mask == 0
        assert left == mask & ~free(*cores)
        for size in (4, 8):
            rooms = [g for g in range(0, 16, size)
                     if (mask >> g & (1 << size) - 1).bit_count() >= n]
            if rooms:
                assert len({(unit - 100) // size for unit in cores}) <= 1, (cores, mask)
                break


def test_a_topology_level_with_wrong_group_sizes_is_ignored() -> None:
    for groups in (((4, 4), (8, 8)), ((16, 0), (8, 8))):
        cores, _ = CoreSet(UNITS, groups).choose(5, ALL & ~free(100, 101, 102, 103))
        assert cores == (108, 109, 110, 111, 112)


def test_taking_more_cores_than_are_free_raises() -> None:
    with pytest.raises(AssertionError, match="3 units wanted, 2 are free"):
        CoreSet(UNITS, GROUPS).choose(3, 0b11)


def test_the_topology_of_this_machine_covers_all_usable_cores() -> None:
    cores = affinity.usable()
    levels = affinity.neighbours(cores)
    assert [sum(sizes) for sizes in levels] == [len(cores)] * 2
    assert len(levels[0]) >= len(levels[1])


def world(**fields: object) -> World:
    w = World("fcfs:1")
    w.happen(ev.BrokerStarted(0, "j", "fcfs:1", "none"))
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n1", "h", UNITS[:8], 64, neighbours=((4, 4), (8,)),
                                          backends=("model",), untrusted=("model",), **fields)))
    w.happen(ev.NodesComplete(0, 1))
    return w


def cores_of(w: World, action: int) -> tuple[int, ...]:
    return w.ledger.leases[w.lease_of(action)].cores


def opened(w: World, count: int) -> list[int]:
    sessions = [w.session(mem=1) for _ in range(count)]
    w.plan()
    for session in sessions:
        w.happen(ev.SessionReady(w.now, session))
    return sessions


def test_a_session_runs_on_its_last_cores_while_they_are_free() -> None:
    w = world()
    one, two = opened(w, 2)
    first, second = w.submit(session=one), w.submit(session=two)
    w.plan()
    assert (cores_of(w, first), cores_of(w, second)) == ((100,), (101,))
    w.finish(first)
    w.finish(second)
    again = w.submit(session=two)
    w.plan()
    assert cores_of(w, again) == (101,)
    first = w.submit(session=two, cpus=(4,))
    w.finish(again)
    w.plan()
    assert cores_of(w, first) == (100, 101, 102, 103)


def test_a_session_action_is_prefetched_on_the_core_where_the_session_ran_last() -> None:
    w = world(ahead=8)
    sessions = opened(w, 24)
    short = Profile(1000)
    where: dict[int, tuple[int, ...]] = {}
    waiting = [w.submit(session=s, profile=short) for s in sessions]
    for round_ in range(6):
        for _ in range(len(sessions)):  # as they end, in whatever order of units
            w.plan()
            running = [a for a in waiting if w.ledger.actions[a].lease
                       and w.ledger.leases[w.lease_of(a)].begun]
            action = running[(7 * round_ + len(waiting)) % len(running)]
            session = w.ledger.actions[action].action.session
            cores = cores_of(w, action)
            assert round_ == 0 or cores == where[session], "the action left its core"
            where[session] = cores
            w.finish(action)
            waiting.remove(action)
            if round_ < 5:
                waiting.append(w.submit(session=session, profile=short))
    assert len({*where.values()}) == 8


def test_a_new_session_or_one_whose_last_core_is_full_goes_to_another_core() -> None:
    w = world(ahead=2)
    sessions = opened(w, 30)
    short = Profile(1000)
    actions = [w.submit(session=s, profile=short) for s in sessions]
    assert len(started(w.plan())) == 8 + 8 * 2
    for action in actions[:24]:
        w.finish(action)
    again = [w.submit(session=sessions[0], profile=short)]  # behind the six that wait already
    assert set(started(w.plan())) == {*actions[24:], *again}


def test_a_returned_prefetched_lease_does_not_change_a_sessions_last_cores() -> None:
    """A lease that was prefetched and returned has left nothing in a cache."""
    w = world(ahead=2)
    sessions = opened(w, 10)
    first = [w.submit(session=s, profile=Profile(1000)) for s in sessions]
    w.plan()
    ninth = sessions[8]
    assert not w.ledger.leases[w.lease_of(first[8])].begun
    assert w.ledger.sessions[ninth].last_cores == ()
    w.happen(ev.LeaseReturned(w.now, w.lease_of(first[8])))
    assert w.ledger.sessions[ninth].last_cores == ()
    w.finish(first[3])
    w.plan()
    assert cores_of(w, first[8]) == w.ledger.sessions[ninth].last_cores == (103,)


@pytest.mark.parametrize(("near", "wanted"), [
    ((100,), (104, 105)),  # its cache is full: the other one of its NUMA domain
    ((104,), (104, 105)),
    ((112,), (114, 115)),
    ((108, 109, 110, 111), (114, 115)),  # a lease that grows
    ((), (114, 115)),  # the fullest
])
def test_a_lease_without_room_in_its_cache_group_stays_in_its_numa_domain(
        near: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """The NUMA domain holds the session's memory."""
    mask = free(104, 105, 106, 107, 114, 115)
    assert CoreSet(UNITS, GROUPS).choose(2, mask, near)[0] == wanted
