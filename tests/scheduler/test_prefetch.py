"""Prefetched leases: which actions get one, what it holds, and how it begins, ends or is
returned."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.lease_queues import LeaseQueues
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ENDED, ActionState
from tangram_hpc.scheduler.placement.prefetch import PREFETCH_NS

SHORT, LONG = Profile(1000), Profile(PREFETCH_NS)


def world(placer: str = "elastic", cpus: int = 1, ahead: int = 8, **fields: str) -> World:
    w = World(placer)
    w.happen(ev.BrokerStarted(0, "j", placer, "none"))
    w.happen(ev.NodeJoined(0, w.ledger.next_node, NodeSpec(
        f"n{w.ledger.next_node}", "h", tuple(range(cpus)), 64, ahead=ahead, backends=("model",),
        untrusted=("model",), **fields)))
    w.happen(ev.NodesComplete(0, 1))
    return w


def orders(made: list[de.Decision]) -> list[tuple[int, int]]:
    return [(d.action, d.after) for d in made if isinstance(d, de.StartLease)]


def test_short_actions_are_prefetched_in_order_and_begin_when_the_unit_is_free() -> None:
    w = world()
    a, b, c = (w.submit(profile=SHORT) for _ in range(3))
    assert orders(w.plan()) == [(a, 0), (b, 1), (c, 2)]
    lease = w.ledger.leases
    assert [lease[n].units for n in (1, 2, 3)] == [1, 0, 0]
    assert not w.finish(a, clean=False) or lease[2].units == 0
    w.happen(ev.LeaseReleased(50, 1))
    assert lease[2].granted_at == 50 and lease[2].units == 1
    w.happen(ev.LeaseFinished(70, 2, Outcome(ActionState.COMPLETED), True))
    w.happen(ev.LeaseFinished(75, 3, Outcome(ActionState.COMPLETED), True))
    rows = fold(w.events).records
    assert [(rows[x].start_ns, rows[x].end_ns) for x in (b, c)] == [(50, 70), (70, 75)]
    assert rows[b].cpu_held_ns == 20


def test_a_lease_that_has_ended_behind_another_one_cannot_be_returned() -> None:
    """Only a worker with an error reports both; the broker must not end of that."""
    w = world()
    _, b = (w.submit(profile=SHORT) for _ in range(2))
    w.plan()
    w.finish(b, clean=False)
    assert w.happen(ev.LeaseReturned(9, 2)) == []
    assert w.ledger.actions[b].state is ActionState.COMPLETED
    w.happen(ev.LeaseReleased(10, 2))
    w.happen(ev.LeaseFinished(11, 1, Outcome(ActionState.COMPLETED), True))
    assert not w.ledger.leases


def test_long_or_demanding_actions_and_those_behind_them_are_not_prefetched() -> None:
    for wants in ({"profile": LONG}, {"mem_mib": 1, "profile": SHORT}, {"profile": None},
                  {"cpus": (1, 2), "profile": SHORT}, {"component": "x", "profile": SHORT}):
        w = world("fcfs:2")
        w.submit(profile=SHORT)
        w.plan()
        w.submit(**wants)
        w.submit(profile=SHORT)
        assert orders(w.plan()) == [], wants


def test_no_lease_is_prefetched_behind_a_long_action_or_to_a_worker_without_prefetch() -> None:
    for ahead, first in ((8, LONG), (0, SHORT)):
        w = world(ahead=ahead)
        w.submit(profile=first)
        w.plan()
        w.submit(profile=SHORT)
        assert started(w.plan()) == []


def test_the_prefetched_work_on_a_unit_is_bounded_by_time() -> None:
    w = world(ahead=1000)
    for _ in range(100):
        w.submit(profile=Profile(PREFETCH_NS // 10))
    assert len(started(w.plan())) == 1 + 10


def test_a_returned_action_keeps_its_place_and_counts_no_attempt() -> None:
    w = world("fcfs:1")
    a, b, c = (w.submit(profile=SHORT) for _ in range(3))
    w.plan()
    w.happen(ev.LeaseReturned(9, w.lease_of(c)))
    w.happen(ev.LeaseReturned(9, w.lease_of(b)))
    assert w.plan() == []  # not at once again behind the one that takes so long
    w.finish(a)
    assert [action for action, _ in orders(w.plan())] == [b, c]
    assert w.ledger.actions[b].attempt == 1


def test_a_cancelled_prefetched_action_ends_whether_killed_or_returned() -> None:
    for given_back in (False, True):
        w = world()
        _, b = w.submit(profile=SHORT), w.submit(profile=SHORT)
        w.plan()
        lease = w.lease_of(b)
        made = w.happen(ev.ActionCancelled(5, b, "no longer wanted"))
        assert [type(d) for d in made] == [de.KillLease]
        made = w.happen(ev.LeaseReturned(6, lease) if given_back else ev.LeaseFinished(
            6, lease, Outcome(ActionState.CANCELLED), True))
        assert replies(made) == {b: ActionState.CANCELLED}


def test_a_lost_node_ends_the_attempts_of_its_prefetched_actions_too() -> None:
    w = world()
    once, again, once_too = (w.submit(profile=SHORT, attempts=n) for n in (1, 2, 1))
    w.plan()
    # each of them may have begun before the node could say so
    assert replies(w.happen(ev.NodeLost(9, 1, "gone"))) == {
        once: ActionState.NODE_FAIL, once_too: ActionState.NODE_FAIL}
    assert w.ledger.actions[again].state is ActionState.PENDING
    assert w.ledger.actions[again].attempt == 1
    records = fold(w.events).records
    assert [(records[each].state, records[each].attempt) for each in (once, once_too)] == [
        (ActionState.NODE_FAIL, 1)] * 2
    assert records[again].attempt == 1
    w.node(cpus=1)
    w.plan()
    w.finish(again)
    assert fold(w.events).records[again].attempt == w.ledger.actions[again].attempt == 2


def test_a_session_with_a_prefetched_action_is_busy_until_the_lease_is_returned() -> None:
    w = world()
    s = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    a = w.submit(profile=SHORT)
    b, c = (w.submit(session=s, profile=SHORT) for _ in range(2))
    assert started(w.plan()) == [a, b]
    w.happen(ev.LeaseReturned(9, w.lease_of(b)))
    w.finish(a)
    assert started(w.plan()) == [b]
    w.finish(b)
    assert started(w.plan()) == [c]


@pytest.mark.parametrize("placer", ["elastic", "first-fit", "fcfs:1", "paper"])
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_of_prefetched_leases_violate_no_invariant(placer: str, seed: int) -> None:
    rng = random.Random(seed)
    w = world(placer, cpus=2, ahead=4)
    sessions = [w.session(mem=1) for _ in range(3)]
    w.plan()
    for s in sessions:
        w.happen(ev.SessionReady(w.now, s))
    ids = []
    for _ in range(400):
        dice = rng.random()
        begun = [x for x in w.ledger.leases.values() if x.begun]
        ahead = [x for x in w.ledger.leases.values() if not x.begun]
        if dice < .45 and len(ids) < 120:
            session = rng.choice([0, 0, *sessions])
            ids.append(w.submit(rng.choice([1, 1, 1, (1, 2), 2]), session, 3,
                                profile=rng.choice([SHORT, SHORT, LONG])))
        elif dice < .5 and ahead:
            w.happen(ev.LeaseReturned(w.now, rng.choice(ahead).lease))
        elif dice < .55 and ids:
            w.happen(ev.ActionCancelled(w.now, rng.choice(ids), "no"))
        elif dice < .57:
            w.happen(ev.NodeJoined(w.now, w.ledger.next_node, NodeSpec(
                "m", "h", (0, 1), 64, backends=("model",), untrusted=("model",), ahead=4)))
        elif dice < .58 and len(w.ledger.up_nodes()) > 1:
            w.happen(ev.NodeLost(w.now, w.ledger.up_nodes()[-1].node, "gone"))
        elif begun:
            lease = rng.choice(begun)
            doomed = w.ledger.actions[lease.action].forced_outcome
            w.now += 1
            if lease.state.value == "RELEASING":
                w.happen(ev.LeaseReleased(w.now, lease.lease))
            else:
                w.happen(ev.LeaseFinished(w.now, lease.lease, Outcome(
                    doomed.state if doomed else ActionState.COMPLETED), rng.random() < .8))
        w.plan()
    while w.ledger.leases:
        for lease in [x for x in w.ledger.leases.values() if x.begun]:
            w.happen(ev.LeaseReleased(w.now, lease.lease) if lease.state.value == "RELEASING" else
                     ev.LeaseFinished(w.now, lease.lease, Outcome(ActionState.COMPLETED), True))
        w.plan()
    assert all(w.ledger.actions[x].state in ENDED for x in ids)
    ends = [d.action for d in w.decisions if isinstance(d, de.ReplyToClient)]
    assert sorted(ends) == sorted(set(ends)) and set(ids) == set(ends)
    assert not w.ledger.short
    rows = fold(w.events).records
    assert {x: rows[x].state for x in ids} == {x: w.ledger.actions[x].state for x in ids}
    assert all(rows[x].submit_ns <= (rows[x].start_ns or rows[x].end_ns) <= rows[x].end_ns
               for x in ids)


def test_removing_a_lease_from_a_queue_moves_up_the_next_lease() -> None:
    queues = LeaseQueues[str]()
    for lease in (2, 3, 4):
        queues.add(lease, lease - 1, f"item {lease}")
    assert queues.heads() == {1} and queues.behind(1) == [4, 3, 2] and len(queues) == 3
    assert queues.remove(3) is None  # 4 moves up behind 2
    assert queues.behind(1) == [4, 2] and 3 not in queues and queues.get(4) == "item 4"
    assert queues.remove(1) == "item 2"
    assert 4 in queues and 2 not in queues and queues.heads() == {2} and queues.get(2) is None
    queues.add(5, 4, "item 5")
    assert queues.behind(2) == [5, 4] and dict(queues.items()) == {4: "item 4", 5: "item 5"}
    assert queues.remove(5) is None and queues.remove(2) == "item 4" and queues.remove(4) is None
    assert not queues and queues.remove(9) is None
