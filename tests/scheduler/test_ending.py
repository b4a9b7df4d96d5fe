"""The end of allocations, and a broker that is restarted: the scheduler alone, on examples by
hand."""

from __future__ import annotations

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.cli.views.explain_verb import lines
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState, NodeState, SessionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler

SECOND = 10**9
PLACERS = ["elastic", "paper", "first-fit", "fcfs:4"]


def ending_world(placer: str = "elastic", ends_s: float = 100, margin_s: float = 10,
                 cpus: int = 4) -> World:
    """One node whose allocation ends; time is in ns from 0."""
    w = World(placer)
    w.ledger.margin_ns = round(margin_s * SECOND)
    join(w, ends_s, cpus)
    w.happen(ev.NodesComplete(w.now, 1))
    return w


def join(w: World, ends_s: float, cpus: int = 4, ahead: int = 0) -> int:
    number = w.ledger.next_node
    w.happen(ev.NodeJoined(w.now, number, NodeSpec(
        f"n{number}", "h", tuple(range(cpus)), 1024, backends=("model",), untrusted=("model",),
        ends_at_ns=round(ends_s * SECOND), ahead=ahead)))
    return number


def advance_to(w: World, seconds: float) -> None:
    w.now = round(seconds * SECOND)


@pytest.mark.parametrize("placer", PLACERS)
def test_an_action_whose_timeout_exceeds_the_allocation_waits_for_another_node(placer: str) -> None:
    w = ending_world(placer)
    advance_to(w, 50)
    late, short = w.submit(timeout_ns=60 * SECOND), w.submit(timeout_ns=20 * SECOND)
    assert set(started(w.plan())) >= ({short} if placer != "fcfs:4" else set())
    assert w.ledger.actions[late].state is ActionState.PENDING
    told = explain(w.scheduler, w.now, show(late))
    assert told["reason"] == "AllocationEnds" and "no node lends for more than" in told["ending"]
    assert "AllocationEnds: it is expected to need" in "\n".join(lines(told))
    second = join(w, 500)
    assert started(w.plan())[0] == late and w.ledger.leases[w.lease_of(late)].node == second


@pytest.mark.parametrize("placer", PLACERS)
def test_a_profile_or_learned_run_time_overrides_the_timeout(placer: str) -> None:
    w = ending_world(placer)
    long = w.submit(profile=Profile(95 * SECOND))
    assert started(w.plan()) == []
    w.happen(ev.ActionCancelled(w.now, long, ""))
    first = w.submit(timeout_ns=80 * SECOND)  # nobody has seen its class
    assert started(w.plan()) == [first]
    advance_to(w, 1)
    w.finish(first)
    for _ in range(20):
        known = w.submit(timeout_ns=80 * SECOND)
        assert started(w.plan()) == [known]
        advance_to(w, w.now / SECOND + 1)
        w.finish(known)
    advance_to(w, 60)
    known = w.submit(timeout_ns=80 * SECOND)  # its class takes about a second
    assert started(w.plan()) == [known]


def test_an_action_with_a_timeout_longer_than_any_allocation_starts() -> None:
    w = ending_world()
    endless = w.submit(timeout_ns=3600 * SECOND)
    assert started(w.plan()) == [endless]


@pytest.mark.parametrize("placer", [*PLACERS, "static:2"])
def test_a_node_is_drained_at_the_margin(placer: str) -> None:
    w = ending_world(placer)
    busy, idle = w.session(), w.session()
    w.plan()
    for session in (busy, idle):
        w.happen(ev.SessionReady(w.now, session))
    runs, waits = w.submit(session=busy), w.submit(session=busy)
    assert started(w.plan()) == [runs]
    assert w.scheduler.next_deadline() <= 90 * SECOND
    advance_to(w, 89.9)
    w.plan()
    assert w.ledger.nodes[1].state is NodeState.UP
    advance_to(w, 90)
    w.plan()
    node = w.ledger.nodes[1]
    assert node.state is NodeState.DRAINING and "its allocation ends in 10 s" in node.draining
    assert w.ledger.sessions[idle].state is SessionState.CLOSING
    assert w.ledger.sessions[busy].state is SessionState.BUSY  # its action goes on to its end
    late, fresh = w.submit(), w.session()
    assert started(w.plan()) == []
    assert explain(w.scheduler, w.now, show(late))["reason"] == "AllocationEnds"
    assert w.ledger.sessions[fresh].state is SessionState.WAITING
    assert replies(w.finish(runs)) == {runs: ActionState.COMPLETED}
    assert replies(w.plan()) == {waits: ActionState.CANCELLED}
    assert w.ledger.sessions[busy].closing == f"node n1: {node.draining}"
    for session in (busy, idle):
        w.happen(ev.SessionClosed(w.now, session, ""))
    assert node.state is NodeState.DRAINED
    w.happen(ev.NodeLost(w.now, 1, "gone"))
    assert w.ledger.draining == {} and w.ledger.next_end == 0
    assert w.ledger.actions[late].state is ActionState.PENDING  # not "never"


def test_no_lease_is_prefetched_on_a_drained_node() -> None:
    w = World("elastic")
    w.ledger.margin_ns = 10 * SECOND
    join(w, 100, cpus=1, ahead=64)
    w.happen(ev.NodesComplete(w.now, 1))
    for _ in range(30):  # a class of short ones
        short = w.submit()
        w.plan()
        w.finish(short)
    runs, follows = w.submit(), w.submit()
    assert started(w.plan()) == [runs, follows]
    advance_to(w, 91)
    w.plan()
    w.submit()
    assert started(w.plan()) == []


# ---- a broker that begins again ------------------------------------------------------------------


def submit_named(w: World, name: str, session: int = 0, kind: Kind = Kind.EXEC) -> int:
    action = Action(w.id(), "x", kind, session=session, once=name)
    w.happen(ev.ActionSubmitted(w.now, action))
    return action.id


def started_world(placer: str = "elastic") -> World:
    w = World(placer)
    w.happen(ev.BrokerStarted(0, "j", placer, "none"))
    return w


def restart_broker(w: World) -> None:
    w.now += 1
    w.happen(ev.BrokerStarted(w.now, "j", w.placer, "none"))


def test_after_a_broker_restart_named_actions_wait_again_and_all_others_end() -> None:
    w = started_world()
    w.node(cpus=3)
    session = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    runs, plain = submit_named(w, "a"), w.submit(attempts=3)
    inside = submit_named(w, "s", session)
    assert started(w.plan()) == [runs, plain, inside]
    waits, unnamed, behind = submit_named(w, "b"), w.submit(), submit_named(w, "t", session)
    restart_broker(w)
    ends = {a: e.outcome.state for a, e in w.ledger.actions.items() if e.outcome is not None}
    assert ends == {} and set(w.ledger.actions) == {runs, waits}  # nobody can ask for the others
    told = replies(w.decisions)
    assert told == {plain: ActionState.NODE_FAIL, inside: ActionState.NODE_FAIL,
                    unnamed: ActionState.NODE_FAIL, behind: ActionState.NODE_FAIL}
    assert w.ledger.once == {"a": runs, "b": waits} and w.ledger.sessions == {}
    assert w.ledger.by_uid == {} and not w.ledger.complete and w.ledger.leases == {}
    w.node(cpus=1)
    assert started(w.plan()) == [runs]  # at its old turn
    w.finish(runs)
    assert w.ledger.once == {"b": waits}
    assert started(w.plan()) == [waits]
    w.finish(waits)
    assert w.ledger.actions == {} and w.ledger.clients == {}  # nobody is left who owns them


def test_a_named_action_outlives_its_client_and_can_be_cancelled() -> None:
    w = started_world("first-fit")
    first, second = submit_named(w, "a"), submit_named(w, "b")
    w.happen(ev.ClientLeft(w.now, 1, True, w.now))
    w.plan()
    assert w.ledger.by_uid == {} and set(w.ledger.actions) == {first, second}
    w.happen(ev.ActionCancelled(w.now, second, ""))
    w.node()
    assert started(w.plan()) == [first]
    w.finish(first)
    assert w.ledger.actions == {} and w.ledger.clients == {}


def test_a_replay_across_broker_restarts_gives_the_same_state() -> None:
    w = started_world()
    for round_ in range(3):
        w.node(cpus=2)
        for n in range(4):
            submit_named(w, f"{round_}.{n}")
            w.submit()
        w.plan()
        w.drain() if round_ == 1 else None
        restart_broker(w)
        w.client = w.ledger.next_client
        w.counter = 0
        w.happen(ev.ClientJoined(w.now, w.client, f"uid{round_}", "t", 0, 1, "socket"))
    twin = Scheduler(make_placer("elastic"))
    for event in w.events:
        twin.handle(event)
    twin.ledger.check()
    assert {k: v.state for k, v in twin.ledger.actions.items()} == {
        k: v.state for k, v in w.ledger.actions.items()}
    assert twin.ledger.once == w.ledger.once and len(twin.ledger.once) == 4
    assert twin.ledger.next_lease == w.ledger.next_lease
    w.node(cpus=2)
    w.drain()
    assert w.ledger.once == {}


def test_a_result_from_before_a_broker_restart_does_not_end_the_new_attempt() -> None:
    w = started_world()
    w.node()
    name = submit_named(w, "a")
    w.plan()
    lease = w.lease_of(name)
    restart_broker(w)
    w.happen(ev.LeaseFinished(w.now, lease, Outcome(ActionState.COMPLETED), True))
    assert w.ledger.once == {"a": name}
