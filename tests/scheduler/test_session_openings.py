"""Sessions that wait for memory: where they open, and which nodes are kept for those that wait."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.scheduler.placement.placers.session_openings import BLOCKED_MOST

LARGE, SMALL = 1000, 250  # MiB; a node has 1,000


def world(nodes: int, placer: str = "elastic") -> World:
    w = World(placer)
    for _ in range(nodes):
        w.node(mem=LARGE)
    return w


def opened(w: World) -> dict[int, int]:
    """The node of each session that has one."""
    return {s: entry.node for s, entry in w.ledger.sessions.items() if entry.node}


def end(w: World, session: int) -> None:
    w.happen(ev.SessionClosing(w.now, session, ""))
    w.happen(ev.SessionClosed(w.now, session, ""))
    w.plan()


def filled(w: World) -> list[int]:
    """Small sessions that fill all nodes, in the order of their opening."""
    sessions = [w.session(SMALL) for _ in range(4 * len(w.ledger.nodes))]
    w.plan()
    assert len(opened(w)) == len(sessions)
    return sessions


@pytest.mark.parametrize("placer", ["elastic", "fcfs:1", "first-fit", "paper"])
def test_a_large_session_keeps_one_node_and_the_others_go_on(placer: str) -> None:
    w = world(4, placer)
    small = filled(w)
    large = w.session(LARGE)
    behind = [w.session(SMALL) for _ in range(8)]
    w.plan()
    assert not set(opened(w)) & {large, *behind}
    homes, kept = opened(w), opened(w)[small[0]]
    end(w, small[0])  # this node lacks least now
    assert not set(opened(w)) & {large, *behind}
    elsewhere = [s for s in small if homes[s] != kept]
    for done, session in enumerate(elsewhere[:8], 1):
        end(w, session)
        assert set(behind[:done]) <= set(opened(w)), "the room on another node was not used"
    for session in small[1:]:
        if homes[session] == kept:
            end(w, session)
    assert opened(w)[large] == kept


def test_on_a_single_node_nothing_overtakes_a_session_that_waits() -> None:
    w = world(1)
    small = filled(w)
    large, behind = w.session(LARGE), w.session(SMALL)
    for session in small:
        assert behind not in opened(w)
        end(w, session)
    assert set(opened(w)) == {large}


def test_each_of_the_first_waiting_sessions_keeps_a_node_up_to_half_of_them() -> None:
    w = world(6)
    small = filled(w)
    large = [w.session(LARGE) for _ in range(5)]
    behind = w.session(SMALL)
    homes = opened(w)
    by_node = {n: [s for s in small if homes[s] == n] for n in w.ledger.nodes}
    for node in list(by_node)[:3]:  # of these each lacks less than the others
        end(w, by_node[node].pop())
    assert not set(opened(w)) & {*large, behind}
    end(w, by_node[5].pop())
    assert opened(w)[behind] == 5
    for node in list(by_node)[:3]:
        for session in by_node[node]:
            end(w, session)
    assert set(large[:3]) <= set(opened(w)) and not set(large[3:]) & set(opened(w))


def test_a_node_that_can_never_hold_a_session_is_not_kept_for_it() -> None:
    w = world(1)
    w.node(mem=LARGE // 2)
    filled_up = [w.session(SMALL) for _ in range(6)]
    w.plan()
    w.session(LARGE)
    behind = w.session(SMALL)
    homes = opened(w)
    end(w, next(s for s in filled_up if homes[s] == 2))
    assert opened(w)[behind] == 2


def test_many_sessions_that_wait_for_one_component_hold_up_no_other_component() -> None:
    w = World("elastic")
    w.node(mem=SMALL, component="a")
    w.node(mem=LARGE, component="b")
    waiting = [w.session(SMALL, component="a") for _ in range(BLOCKED_MOST + 10)]
    other = w.session(SMALL, component="b")
    w.plan()
    assert set(opened(w)) == {waiting[0], other}


def test_many_forks_of_a_busy_session_hold_up_no_other_session() -> None:
    w = world(3)
    origin = w.session(SMALL)
    w.plan()
    w.happen(ev.SessionReady(w.now, origin))
    w.submit(1, session=origin)
    w.plan()
    forks = [w.session(SMALL, origin=origin) for _ in range(BLOCKED_MOST + 10)]
    other = w.session(SMALL)
    w.plan()
    assert other in opened(w) and not set(forks) & set(opened(w))


def test_each_component_keeps_nodes_for_its_own_sessions() -> None:
    w = World("elastic")
    w.node(mem=LARGE, component="a")
    for _ in range(2):
        w.node(mem=LARGE, component="b")
    small = [w.session(SMALL, component=c) for c in "abb" for _ in range(4)]
    w.plan()
    w.session(LARGE, component="a")
    large = w.session(LARGE, component="b")
    behind = [w.session(SMALL, component="b") for _ in range(8)]
    homes = opened(w)
    kept = [s for s in small if homes[s] == 2]
    for session in kept:  # one by one; nothing else may take the room
        end(w, session)
    assert opened(w).get(large) == 2 and not set(behind) & set(opened(w))


@pytest.mark.parametrize("seed", range(6))
def test_every_session_opens_in_the_end_whatever_its_size(seed: int) -> None:
    """A stream of small sessions never ends, and large ones come now and then. None of them waits
    for as many as 300 later requests."""
    rng, w = random.Random(seed), world(5)
    waiting_since: dict[int, int] = {}
    for step in range(1500):
        mem = LARGE if rng.random() < 0.02 else rng.choice([100, SMALL, 500])
        session = w.session(mem)
        if mem == LARGE:
            waiting_since[session] = step
        w.plan()
        at_home = list(opened(w))
        if len(w.ledger.sessions) - len(at_home) > 5:  # so that the nodes are full at all times
            end(w, rng.choice(at_home))
        for one in [s for s in waiting_since if s in opened(w) or s not in w.ledger.sessions]:
            del waiting_since[one]
        assert all(step - since < 300 for since in waiting_since.values())
        for entry in w.ledger.nodes.values():
            assert entry.room_mib >= 0


def request_where(w: World, mem: int, node: int) -> int:
    """Requests a session whose snapshot is on this node."""
    spec = SessionSpec(w.id(), "s", mem, snapshot="snap")
    w.happen(ev.SessionRequested(w.now, spec, (node,)))
    return spec.id


def test_a_session_opens_where_its_snapshot_is_if_that_node_has_hardly_more_sessions() -> None:
    w = World("elastic")
    nodes = [w.node(2, LARGE) for _ in range(3)]
    homes = []
    for _ in range(4):
        session = request_where(w, SMALL, nodes[1])
        w.plan()
        homes.append(opened(w)[session])
    assert homes == [nodes[1], nodes[1], nodes[0], nodes[2]]


def test_a_session_opens_elsewhere_where_the_nodes_of_its_snapshot_have_no_memory() -> None:
    w = World("elastic")
    first, second = w.node(4, LARGE), w.node(4, LARGE)
    sessions = [request_where(w, LARGE, second) for _ in range(2)]
    w.plan()
    assert [opened(w)[session] for session in sessions] == [second, first]


def test_a_large_group_from_one_snapshot_spreads_over_all_nodes() -> None:
    w = World("elastic")
    nodes = [w.node(64, 100 * SMALL) for _ in range(4)]
    homes = []
    for _ in range(80):
        session = request_where(w, SMALL, nodes[1])
        w.plan()
        homes.append(opened(w)[session])
    counts = [homes.count(node) for node in nodes]
    assert homes[:8] == [nodes[1]] * 8 and counts[1] == max(counts)
    assert max(counts) - min(counts) <= 64 // 8 + 1
