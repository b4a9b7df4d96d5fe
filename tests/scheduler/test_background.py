"""The background action of a session: when it is added, who gives way to whom, and how it ends."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.accounting.record import fold
from tangram_hpc.broker.message_validation import CHECKS
from tangram_hpc.broker.sandbox_reports import event_of_report
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState, SessionState
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import refusal_of_session
from tangram_hpc.scheduler.policy.background import SLICE_NS
from tangram_hpc.scheduler.scheduler import Scheduler

PLACERS = ["elastic", "fcfs:4", "first-fit", "static:1", "paper"]


def opened(w: World, **fields) -> int:
    session = w.session(background="run", **fields)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    return session


def wants(w: World, session: int) -> int:
    """Lets the session's worker say that something could run; returns the action, 0 for none."""
    w.now += 1
    entry = w.ledger.sessions[session]
    event = event_of_report(w.ledger, entry.node, ms.BackgroundWants(session), w.now)
    if event is not None:
        w.happen(event)
    return entry.background


def killed(made: list[de.Decision]) -> dict[int, ActionState]:
    return {d.lease: d.state for d in made if isinstance(d, de.KillLease)}


def ends(w: World, made: list[de.Decision]) -> None:
    """Lets the worker carry these kills out."""
    for lease, state in killed(made).items():
        w.now += 1
        w.happen(ev.LeaseFinished(w.now, lease, Outcome(state, exec_ns=1), True))


@pytest.mark.parametrize("placer", PLACERS)
def test_cores_are_held_from_the_first_wish_to_the_end(placer: str) -> None:
    w = World(placer)
    node = w.node(cpus=2)
    s = opened(w)
    action = wants(w, s)
    assert action and wants(w, s) == action, "a session has one such action at a time"
    assert started(w.plan()) == [action]
    entry = w.ledger.actions[action]
    assert (entry.action.kind, entry.action.name) == (Kind.BACKGROUND, "background")
    assert w.ledger.sessions[s].state is SessionState.IDLE
    assert w.finish(action) == [], "no client waits for it"
    assert action not in w.ledger.actions and not w.ledger.sessions[s].background
    assert w.ledger.nodes[node].cores.free == (2 if placer != "static:1" else 1)
    again = wants(w, s)
    assert again and again != action


@pytest.mark.parametrize("placer", PLACERS)
def test_an_action_of_the_session_takes_over_and_the_processes_ask_again(placer: str) -> None:
    w = World(placer)
    w.node(cpus=2)
    s = opened(w)
    action = wants(w, s)
    w.plan()
    lease = w.lease_of(action)
    own = w.submit(session=s)
    made = w.plan()
    assert started(made) == [own]
    assert killed(made) == {lease: ActionState.PREEMPTED}
    ordered = [type(d) for d in made]
    assert ordered.index(de.KillLease) < ordered.index(de.StartLease)
    ends(w, made)
    assert w.plan() == []
    w.finish(own)
    assert started(w.plan()) == []
    following = wants(w, s)
    assert started(w.plan()) == [following]


def test_files_are_read_beside_background_processes() -> None:
    w = World("first-fit")
    w.node(cpus=1)
    s, other = opened(w), opened(w)
    action, waiting = wants(w, s), wants(w, other)
    w.plan()
    for session in (s, other):
        read = w.submit((0,), session=session)
        made = w.plan()
        assert started(made) == [read] and not killed(made)
        w.finish(read)
    assert w.lease_of(action)
    w.finish(action)
    assert started(w.plan()) == [waiting]


def test_a_waiting_background_action_keeps_its_place_while_its_session_is_polled() -> None:
    w = World("first-fit")
    w.node(cpus=1)
    s, other = opened(w), opened(w)
    busy = w.submit(session=other)
    w.plan()
    waiting = wants(w, s)
    later = w.submit()
    for _ in range(5):
        poll = w.submit(session=s)
        assert w.plan() == []
        w.happen(ev.ActionCancelled(w.now, poll, "it was polled in vain"))
    assert w.ledger.sessions[s].background == waiting
    w.finish(busy)
    assert started(w.plan()) == [waiting], f"{later} came later"


def test_a_poll_takes_the_waiting_action_out_of_the_queue_and_puts_it_back() -> None:
    w = World("first-fit")
    w.node(cpus=1)
    s = opened(w)
    poll = w.submit(session=s)
    w.plan()
    waiting = wants(w, s)
    tag = w.ledger.actions[waiting].order_tag
    assert waiting not in w.ledger.ready
    w.finish(poll)
    assert waiting in w.ledger.ready and w.ledger.actions[waiting].order_tag >= tag
    assert started(w.plan()) == [waiting]


def test_a_session_never_gets_cores_twice_in_one_pass() -> None:
    w = World("first-fit")
    w.node(cpus=2)
    s = opened(w)
    poll = w.submit(session=s)
    waiting = wants(w, s)
    assert started(w.plan()) == [poll]
    w.finish(poll)
    assert started(w.plan()) == [waiting]


@pytest.mark.parametrize("placer", ["elastic", "fcfs:4", "first-fit", "paper"])
def test_a_slice_ends_when_others_wait_and_not_before(placer: str) -> None:
    w = World(placer)
    w.node(cpus=1)
    s = opened(w)
    first = wants(w, s)
    w.plan()
    w.now += 10 * SLICE_NS
    assert w.plan() == [], "nobody waits, so it goes on"
    other = w.submit()
    made = w.plan()
    assert killed(made) == {w.lease_of(first): ActionState.PREEMPTED}
    assert w.plan() == [], "it is ended once"
    ends(w, made)
    assert started(w.plan()) == [other]
    second = wants(w, s)
    w.finish(other)
    assert started(w.plan()) == [second]
    third = w.submit()
    assert w.plan() == []
    granted = w.ledger.leases[w.lease_of(second)].granted_at
    assert w.scheduler.next_deadline() == granted + SLICE_NS
    w.now = granted + SLICE_NS
    made = w.plan()
    ends(w, made)
    assert started(w.plan()) == [third]


@pytest.mark.parametrize("placer", ["elastic", "fcfs:4", "first-fit", "paper"])
def test_a_slice_ends_when_its_tenant_may_hold_no_more(placer: str) -> None:
    w = World(placer)
    w.happen(ev.TenantDeclared(0, TenantSpec("a", grp_tres=(("cpu", 1),))))
    w.happen(ev.TenantNamed(0, 1, "a"))
    w.node(cpus=4)
    s = opened(w)
    first = wants(w, s)
    w.plan()
    poll = w.submit(session=s)
    assert w.plan() == [], "its slice is not over"
    assert w.scheduler.next_deadline() == w.ledger.leases[w.lease_of(first)].granted_at + SLICE_NS
    w.now += SLICE_NS
    made = w.plan()
    assert killed(made) == {w.lease_of(first): ActionState.PREEMPTED}
    ends(w, made)
    assert started(w.plan()) == [poll]


def test_no_slice_ends_for_what_another_tenant_may_not_hold() -> None:
    w = World("first-fit")
    for client, name in enumerate("ab", 1):
        w.happen(ev.TenantDeclared(0, TenantSpec(name, grp_tres=(("cpu", 1),))))
        if client > 1:
            w.happen(ev.ClientJoined(0, client, f"uid-{client}", name, 0, 1, "socket"))
        w.happen(ev.TenantNamed(0, client, name))
    w.node(cpus=4)
    s = opened(w)
    wants(w, s)
    w.client = 2
    w.submit()
    w.submit()
    w.plan()
    w.now += 10 * SLICE_NS
    assert w.plan() == []


def test_background_processes_that_their_tenant_may_never_run_are_refused() -> None:
    w = World("first-fit")
    w.happen(ev.TenantDeclared(0, TenantSpec("a", grp_tres=(("cpu", 1),))))
    w.happen(ev.TenantNamed(0, 1, "a"))
    w.node(cpus=4)
    spec = w.ledger.sessions[w.session(background="run", background_cpus=(2, 4))].spec
    told = refusal_of_session(w.ledger, w.scheduler.state.placer, spec)
    assert told.startswith("background_cpus: 2 asked for, but tenant 'a' may hold 1 CPUs"), told


def test_reserved_cores_are_never_taken_from_background_processes_for_others() -> None:
    w = World("static:1")
    w.node(cpus=1)
    s = opened(w)
    wants(w, s)
    w.plan()
    w.submit()
    w.now += 10 * SLICE_NS
    assert w.plan() == []


def test_no_more_leases_end_than_actions_wait_and_only_on_their_node() -> None:
    w = World("first-fit")
    w.node(cpus=2, component="a")
    w.node(cpus=2, component="b")
    sessions = [opened(w, component=c) for c in "aabb"]
    for s in sessions:
        wants(w, s)
    w.plan()
    w.now += 2 * SLICE_NS
    w.submit(component="b")
    made = w.plan()
    assert list(killed(made)) == [w.lease_of(w.ledger.sessions[sessions[2]].background)]


@pytest.mark.parametrize("placer", ["elastic", "fcfs:4", "first-fit"])
def test_many_sessions_share_few_cores(placer: str) -> None:
    """Twenty sessions with endless processes on two cores, and one action after the other beside
    them: each session gets about the same, and no action waits long."""
    w = World(placer)
    w.node(cpus=2)
    sessions = [opened(w) for _ in range(20)]
    for s in sessions:
        wants(w, s)
    held = dict.fromkeys(sessions, 0)
    waited, foreground = [], 0
    while w.now < 300 * SLICE_NS:
        if not foreground:
            foreground, since = w.submit(), w.now
        made = w.plan()
        if foreground in started(made):
            waited.append(w.now - since)
            w.finish(foreground)
            foreground = 0
        for lease in killed(made):
            entry = w.ledger.leases[lease]
            held[entry.session] += w.now - entry.granted_at
        ends(w, made)
        for s in sessions:
            if not w.ledger.sessions[s].background:
                wants(w, s)
        if not made:  # else the broker plans again at once
            w.now = max(w.now, w.scheduler.next_deadline() or w.now + SLICE_NS)
    assert len(waited) > 5 and max(waited) < 60 * SLICE_NS, waited
    assert max(held.values()) <= 2 * min(held.values()), held


def test_a_session_with_running_background_processes_is_not_idle_and_its_client_may_go() -> None:
    w = World()
    w.node()
    s = opened(w, idle_ns=100)
    action = wants(w, s)
    w.plan()
    assert w.scheduler.next_deadline() == 0
    w.now += 10_000
    assert w.plan() == []
    w.finish(action)
    assert w.scheduler.next_deadline() == w.now + 100
    wants(w, s)
    w.plan()
    w.happen(ev.ClientLeft(w.now, 1, False, w.now + 500))
    w.now += 500
    assert [d.session for d in w.plan() if isinstance(d, de.CloseSession)] == [s]


def test_the_end_of_a_session_ends_its_background_action_running_or_waiting() -> None:
    w = World("first-fit")
    w.node(cpus=1)
    running, waiting = opened(w), opened(w)
    one = wants(w, running)
    w.plan()
    two = wants(w, waiting)
    for s in (running, waiting):
        w.happen(ev.SessionClosing(w.now, s, ""))
    assert two not in w.ledger.actions
    w.happen(ev.LeaseFinished(w.now, w.lease_of(one), Outcome(ActionState.CANCELLED), True))
    for s in (running, waiting):
        w.happen(ev.SessionClosed(w.now, s, ""))
    assert not w.ledger.sessions and not w.ledger.leases and not len(w.ledger.ready)
    assert {r.state for r in fold(w.events).records.values()} == {ActionState.CANCELLED}


@pytest.mark.parametrize("busy", [False, True])
def test_the_loss_of_a_node_ends_it(busy: bool) -> None:
    w = World("first-fit")
    node = w.node(cpus=1)
    other = w.submit() if busy else 0
    w.plan()
    s = w.session(background="run")
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    action = wants(w, s)
    w.plan()
    assert bool(w.lease_of(action)) != busy
    w.happen(ev.NodeLost(w.now, node, "gone"))
    assert not w.ledger.sessions and action not in w.ledger.actions and not w.ledger.leases
    assert action in {r.action.id for r in fold(w.events).records.values()}
    assert other in w.ledger.actions or not busy


def test_a_drained_node_takes_its_cores_back_before_it_closes_its_sessions() -> None:
    w = World("first-fit")
    node = w.node(cpus=1)
    running, waiting = opened(w), opened(w)
    wants(w, running)
    w.plan()
    assert wants(w, waiting)
    w.happen(ev.NodeDraining(w.now, node, "maintenance"))
    made = w.plan()
    assert list(killed(made).values()) == [ActionState.PREEMPTED]
    assert [d.session for d in made if isinstance(d, de.CloseSession)] == [waiting]
    assert wants(w, running) and not w.plan()
    ends(w, made)
    assert not wants(w, running)
    assert [d.session for d in w.plan() if isinstance(d, de.CloseSession)] == [running]


@pytest.mark.parametrize("bye", [True, False])
@pytest.mark.parametrize("runs", [True, False])
def test_the_background_of_a_session_that_outlives_its_client_goes_on_without_it(
        bye: bool, runs: bool) -> None:
    """Its end is that of the session. An end that came with the client's was named in each pass
    again, as a waiting background action is not cancelled at once."""
    w = World("first-fit")
    w.node(cpus=1)
    s = opened(w, outlives=True, ttl_ns=10**12, attach_hash="a" * 64, close_hash="b" * 64)
    other = None if runs else w.submit()
    w.plan()
    action = wants(w, s)
    assert started(w.plan()) == ([action] if runs else [])
    w.happen(ev.ClientLeft(w.now, w.client, bye, w.now + (0 if bye else 10)))
    w.now += 11
    passes = 0
    while made := w.plan():
        passes += 1
        assert passes < 10 and s in w.ledger.sessions
        assert w.lease_of(action) not in killed(made)
    assert w.ledger.sessions[s].background == action, other


def test_a_deferred_cancellation_does_not_keep_a_session_on_a_drained_node() -> None:
    w = World("first-fit")
    node = w.node(cpus=1)
    busy = w.submit()
    w.plan()
    s = opened(w)
    action = wants(w, s)
    w.plan()
    w.happen(ev.ActionCancelled(w.now, action, "no longer wanted", ActionState.CANCELLED))
    w.happen(ev.NodeDraining(w.now, node, "maintenance"))
    for _ in range(3):
        w.plan()
    w.finish(busy)
    w.plan()
    assert w.ledger.sessions[s].state is SessionState.CLOSING


def test_a_fork_stops_its_origin_while_its_files_are_copied() -> None:
    w = World("first-fit")
    w.node(cpus=2)
    s = opened(w)
    action = wants(w, s)
    w.plan()
    fork = w.session(background="run", origin=s)
    made = w.plan()
    assert killed(made) == {w.lease_of(action): ActionState.PREEMPTED}
    assert [type(d) for d in made] == [de.KillLease, de.OpenSession]
    ends(w, made)
    again = wants(w, s)
    assert w.plan() == []
    w.happen(ev.SessionReady(w.now, fork))
    assert started(w.plan()) == [again]


def test_its_owner_may_cancel_it_while_it_runs_or_waits() -> None:
    w = World("first-fit")
    w.node(cpus=1)
    s = opened(w)
    action = wants(w, s)
    w.plan()
    made = w.happen(ev.ActionCancelled(w.now, action, "by its client"))
    assert killed(made) == {w.lease_of(action): ActionState.CANCELLED}
    ends(w, made)
    busy = w.submit()
    w.plan()
    action = wants(w, s)
    assert w.happen(ev.ActionCancelled(w.now, action, "by its client")) == []
    assert w.plan() == []
    w.finish(busy)
    made = w.plan()
    assert started(made) == [action]
    assert killed(made) == {w.lease_of(action): ActionState.CANCELLED}


def test_a_replay_and_a_new_start_of_the_broker_reach_the_same_state() -> None:
    w = World("elastic")
    w.node(cpus=2)
    w.happen(ev.BrokerStarted(w.now, "j", "elastic", "none"))
    sessions = [opened(w, idle_ns=10**12) for _ in range(4)]
    random_ = random.Random(1)
    for _ in range(200):
        w.now += random_.randrange(SLICE_NS)
        s = random_.choice(sessions)
        if random_.random() < .5:
            w.submit(session=s)
        else:
            wants(w, s)
        ends(w, w.plan())
        leases = list(w.ledger.leases)
        if leases and random_.random() < .7:
            w.happen(ev.LeaseFinished(w.now, random_.choice(leases),
                                      Outcome(ActionState.COMPLETED, exec_ns=1), True))
    twin = Scheduler(make_placer("elastic"))
    for event in w.events:
        twin.handle(event)
    for table in ("clients", "sessions", "actions", "leases", "background", "idle_deadlines"):
        assert getattr(twin.ledger, table) == getattr(w.ledger, table), table
    w.happen(ev.BrokerStarted(w.now, "j", "elastic", "none"))
    assert not w.ledger.sessions and not w.ledger.background
    assert all(e.action.kind is not Kind.BACKGROUND for e in w.ledger.actions.values())
    states = [r.state for r in fold(w.events).records.values()
              if r.action.kind is Kind.BACKGROUND]
    assert states and ActionState.PENDING not in states and ActionState.RUNNING not in states


def test_only_the_broker_submits_one_and_ids_do_not_collide() -> None:
    w = World()
    w.node()
    s = opened(w)
    first = wants(w, s)
    own = Action(first + 1, "background", Kind.BACKGROUND, session=s)
    assert CHECKS[ms.Submit](ms.Submit(own)).startswith("kind: only the broker")
    w.plan()
    w.happen(ev.ActionSubmitted(w.now, Action(first + 1, "mine")))  # ids are its client's to choose
    w.finish(first)
    assert wants(w, s) == first + 2
    assert replies(w.plan()) == {}


@pytest.mark.parametrize("fields, why", [
    ({"background": "run", "background_cpus": (0, 1)}, "background_cpus: (0, 1) must be"),
    ({"background": "run", "background_cpus": ()}, "background_cpus: () must be"),
    ({"background": "stop", "background_cpus": (1, 2)}, 'pass background="run"'),
    ({"background": "run", "background_cpus": (8,)}, "the largest node has 4"),
])
def test_bounds_that_make_no_sense_are_refused(fields: dict, why: str) -> None:
    w = World()
    w.node(cpus=4)
    spec = SessionSpec(w.id(), **fields)
    assert why in refusal_of_session(w.ledger, w.scheduler.state.placer, spec)


def test_other_sessions_and_unknown_ones_get_nothing() -> None:
    w = World()
    node = w.node()
    s = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    assert not wants(w, s), "its background is stopped between actions"
    assert event_of_report(w.ledger, node + 1, ms.BackgroundWants(s), w.now) is None
    assert event_of_report(w.ledger, node, ms.BackgroundWants(s + 1), w.now) is None
