"""The views `queue`, `pending` and `top` of a broker: their reasons and counts are those of the
scheduler's own look at each action, and a long queue gives a bounded answer."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from helpers.builders import World

from tangram_hpc.broker.queries.queue_view import ROWS_MAX, queue
from tangram_hpc.broker.queries.recent_actions import RecentActions
from tangram_hpc.broker.queries.status import PENDING_MAX, pending
from tangram_hpc.broker.queries.top_view import ROWS_MAX as TOP_ROWS_MAX
from tangram_hpc.broker.queries.top_view import top
from tangram_hpc.broker.queries.wait_reasons import WaitReasons
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.decision import ReplyToClient
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import EndpointSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.policy.admission import reason

S = 10**9


def told_one_by_one(world: World) -> Counter[str]:
    reserve = world.scheduler.state.placer.reserve
    return Counter(reason(world.ledger, entry, reserve, world.now)
                   for entry in world.ledger.actions.values()
                   if entry.state is ActionState.PENDING)


def a_step(world: World, chance: random.Random, sessions: list[int]) -> None:
    """Lets something happen that changes who waits, or why."""
    kind = chance.randrange(8)
    if kind == 0:
        sessions.append(world.session(chance.choice([100, 900]),
                                      parallel=chance.random() < 0.3))
    elif kind == 1 and world.ledger.leases:
        lease = chance.choice(list(world.ledger.leases))
        world.happen(ev.LeaseFinished(world.now, lease, Outcome(ActionState.COMPLETED), True))
    elif kind == 2:
        world.plan()
    elif kind == 3 and sessions:
        opening = [s for s in sessions if world.ledger.sessions[s].state.value == "OPENING"]
        for session in opening[:1]:
            world.happen(ev.SessionReady(world.now, session))
    elif kind == 4:
        world.submit(1, key="endpoint:search")
    elif kind == 5:
        world.submit((1, 2), mem_mib=chance.choice([0, 700]))
    else:
        world.submit(1, session=chance.choice([0, *sessions]))


@pytest.mark.parametrize("seed", range(8))
def test_reasons_that_are_shared_are_those_of_each_action(seed: int) -> None:
    chance, sessions = random.Random(seed), list[int]()
    world = World("elastic")
    world.happen(ev.EndpointDeclared(0, EndpointSpec("search", 1)))
    if seed % 4:
        world.node(cpus=2)
    seen: set[str] = set()
    for _ in range(120):
        a_step(world, chance, sessions)
        expected = told_one_by_one(world)
        assert WaitReasons(world.scheduler, world.now).counts() == expected
        rows = queue(world.scheduler, "state=PENDING", world.now)["queue"]
        assert Counter(row["reason"] for row in rows) == expected
        assert Counter(row["reason"] for row in pending(world.scheduler, "j", world.now)["pending"]
                       ) == expected
        seen |= set(expected)
    assert len(seen) > (2 if seed % 4 else 0), "the walk must meet several reasons"


def test_what_runs_comes_first_and_the_ask_chooses_among_all() -> None:
    world = World("elastic")
    world.node(cpus=2)
    actions = [world.submit(1) for _ in range(5)]
    world.plan()
    world.now += 3 * S
    rows = queue(world.scheduler, "", world.now)["queue"]
    assert [row["action"] for row in rows] == [show(a) for a in actions]
    assert [row["state"] for row in rows] == ["CONFIGURING"] * 2 + ["PENDING"] * 3
    assert [row["reason"] for row in rows] == ["", ""] + ["Resources"] * 3
    assert {row["node"] for row in rows[:2]} == {"n1"}
    assert [row["elapsed_ns"] >= 3 * S for row in rows] == [True, True, False, False, False]
    assert all(row["planned_ns"] >= 3 * S for row in rows[2:])

    def ids(ask: str) -> list[str]:
        return [row["action"] for row in queue(world.scheduler, ask, world.now)["queue"]]

    assert ids("state=PENDING") == [show(a) for a in actions[2:]]
    assert ids(f"action={show(actions[4])}&action={show(actions[0])}") == [
        show(actions[0]), show(actions[4])]
    assert ids("name=x") == [row["action"] for row in rows] and ids("name=y") == []
    assert ids("state=COMPLETED") == []
    assert ids("node=n1") == [show(a) for a in actions[:2]] and ids("node=n2") == []
    cut = queue(world.scheduler, "limit=1&state=PENDING", world.now)
    assert (len(cut["queue"]), cut["more"]) == (1, 2)
    world.finish(actions[0])
    assert show(actions[0]) not in ids(""), "an action that has ended is in the books"


@pytest.mark.parametrize("ask", ["limit=x", "limit=-1", "color=red", "action=7", "nonsense",
                                 "client=x", "&".join(["name=x"] * 2000)])
def test_a_wrong_ask_is_answered_with_what_is_wrong(ask: str) -> None:
    told = queue(World().scheduler, ask, 0)
    assert told["error"].startswith("queue: ")


def test_a_long_queue_gives_a_bounded_answer() -> None:
    world = World("first-fit")
    for _ in range(20):
        world.node(cpus=50)
    total = 10_000 + 1_000
    scheduler = world.scheduler
    for number in range(total):  # not by `submit`, which proves the ledger's laws each time
        scheduler.handle(ev.ActionSubmitted(number, Action(world.id(), "x", Kind.EXEC)))
    now = total
    while events := scheduler.plan(now):
        for event in events:
            scheduler.handle(event)
    running = len(world.ledger.leases)
    assert running == 1_000
    told = queue(scheduler, "", now)
    assert (len(told["queue"]), told["more"]) == (1_000, total - 1_000)
    assert len(queue(scheduler, f"limit={10 ** 9}", now)["queue"]) == ROWS_MAX
    waits = pending(scheduler, "j", now)
    assert (len(waits["pending"]), waits["pending_more"]) == (PENDING_MAX, 10_000 - PENDING_MAX)

    def cpu_s(make) -> float:
        best = []
        for _ in range(5):
            began = time.process_time()
            make()
            best.append(time.process_time() - began)
        return min(best)

    glance = top(scheduler, RecentActions(), "j", now)
    assert glance["reasons"] == {"Resources": 10_000} and glance["running"] == 1_000
    assert len(glance["running_rows"]) == len(glance["node_rows"]) + 30 == TOP_ROWS_MAX
    # the queue is not walked: a glance costs less than one look at each waiting action
    assert cpu_s(lambda: top(scheduler, RecentActions(), "j", now)) < cpu_s(
        lambda: [WaitReasons(scheduler, now).of(e) for e in world.ledger.actions.values()
                 if e.state is ActionState.PENDING])


def test_recent_actions_are_counted_by_windows() -> None:
    recent = RecentActions()

    def ends(at: int, state: ActionState = ActionState.COMPLETED) -> None:
        recent.note(ReplyToClient(1, Outcome(state), 1, (0,), 1, 1 * S, 3 * S), at)

    assert all(w["act_s"] is None and w["rate"] == 0 for w in recent.view(1000 * S))
    for second in range(1000, 1060):
        ends(second * S)
    ends(1059 * S, ActionState.FAILED)
    by_window = {w["window_s"]: w for w in recent.view(1060 * S)}
    assert by_window[60]["ended"] == 61 and by_window[60]["failed"] == 1
    assert by_window[5]["ended"] == 6 and by_window[5]["rate"] == pytest.approx(6 / 5)
    assert by_window[300]["act_s"] == pytest.approx(4.0)
    assert (by_window[60]["wait_s"], by_window[60]["held_s"]) == (1.0, 3.0)
    later = {w["window_s"]: w["ended"] for w in recent.view(1200 * S)}
    assert later == {5: 0, 60: 0, 300: 61, 900: 61}
    for second in range(2000, 4000):
        ends(second * S)
    assert len(recent._slots) < 200, "what is over is forgotten"


def test_a_component_chooses_what_is_there_and_what_waits_for_it() -> None:
    """An action of a session names no component: its session does, or the session's node."""
    world = World("elastic")
    world.node(cpus=1, mem=20, component="cpu")
    there = world.session(mem=10, component="cpu")
    world.plan()
    world.happen(ev.SessionReady(world.now, there))
    first, behind = (world.submit(1, session=there) for _ in range(2))
    world.plan()
    waits = world.submit(1, session=world.session(mem=99, component="gpu"))
    plain = world.submit(1)

    def ids(ask: str) -> list[str]:
        return [row["action"] for row in queue(world.scheduler, ask, world.now)["queue"]]

    assert ids("partition=cpu") == [show(first), show(behind)]
    assert ids("partition=gpu") == [show(waits)] and ids("partition=x") == []
    assert ids("partition=") == [show(plain)]
