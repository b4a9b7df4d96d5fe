"""How sessions begin and end: forks, idle timeouts, grace periods, and what each of them waits
for."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState, SessionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy import session_life
from tangram_hpc.scheduler.policy.admission import refusal_of_session
from tangram_hpc.scheduler.scheduler import Scheduler


def opened(w: World, **fields) -> int:
    session = w.session(**fields)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    return session


def closing(made: list[de.Decision]) -> list[int]:
    return [d.session for d in made if isinstance(d, de.CloseSession)]


def ended(made: list[de.Decision]) -> dict[int, str]:
    return {d.session: d.reason for d in made if isinstance(d, de.AnnounceSessionEnd)}


# ---- closing -----------------------------------------------------------------------------------


def test_a_session_closes_while_leftovers_of_its_last_action_are_being_killed() -> None:
    w = World()
    node = w.node()
    s = opened(w)
    action = w.submit(session=s)
    w.plan()
    lease = w.lease_of(action)
    assert replies(w.finish(action, ActionState.FAILED, clean=False)) == {
        action: ActionState.FAILED}
    assert closing(w.happen(ev.SessionClosing(w.now, s, ""))) == [s]
    w.happen(ev.SessionClosed(w.now, s, ""))
    w.happen(ev.LeaseReleased(w.now, lease))
    assert not w.ledger.sessions and not w.ledger.leases
    assert not w.ledger.nodes[node].leases


def test_an_action_whose_order_was_lost_ends_if_its_session_has_ended_meanwhile() -> None:
    """The broker is killed before its order reaches the worker, whose sandbox has failed."""
    w = World()
    w.node()
    s = opened(w)
    action = w.submit(session=s)
    w.plan()
    lease = w.lease_of(action)
    w.happen(ev.SessionClosed(w.now, s, "it failed"))
    w.happen(ev.BrokerStarted(w.now, "j", "first-fit", "none", await_until=w.now + 9))
    made = w.happen(ev.LeaseReturned(w.now, lease, True))
    assert replies(made) == {action: ActionState.CANCELLED}
    assert action not in w.ledger.ready and not w.ledger.leases
    record = fold(w.events).records[action]
    assert record.state is ActionState.CANCELLED and "ended before" in record.outcome.reason


# ---- idle --------------------------------------------------------------------------------------


def test_an_idle_session_closes_at_its_timeout_which_work_or_renewal_restarts() -> None:
    w = World()
    w.node()
    other, s = opened(w), opened(w, idle_ns=100)
    begun = w.now
    assert w.scheduler.next_deadline() == begun + 100
    w.now = begun + 50
    w.happen(ev.SessionRenewed(w.now, s))
    assert w.scheduler.next_deadline() == begun + 150
    w.now = begun + 140
    action = w.submit(session=s)
    assert w.scheduler.next_deadline() == 0  # it waits: nothing ends
    w.plan()
    w.now = begun + 10_000
    assert closing(w.plan()) == [] and w.scheduler.next_deadline() == 0  # it runs
    w.finish(action)
    last = w.now
    assert w.scheduler.next_deadline() == last + 100
    w.now = last + 98
    assert closing(w.plan()) == []
    w.now = last + 99
    assert closing(w.plan()) == [s]
    w.happen(ev.SessionClosed(w.now, s, "idle"))
    assert w.scheduler.next_deadline() == 0 and list(w.ledger.sessions) == [other]


def test_the_idle_time_starts_at_a_lease_release_or_the_end_of_a_cancelled_wait() -> None:
    w = World()
    w.node(cpus=1)
    s = opened(w, idle_ns=100)
    a = w.submit(session=s)
    w.plan()
    lease = w.lease_of(a)
    w.finish(a, clean=False)
    assert w.scheduler.next_deadline() == 0
    w.now = 500
    w.happen(ev.LeaseReleased(500, lease))
    assert w.scheduler.next_deadline() == 600
    blocker = w.submit()
    w.plan()
    waits = w.submit(session=s)
    assert w.scheduler.next_deadline() == 0
    w.now = 550
    w.happen(ev.ActionCancelled(550, waits, "enough"))
    assert w.scheduler.next_deadline() == 650 and w.ledger.actions[blocker].lease


def test_sessions_with_different_idle_timeouts_close_at_their_own_deadlines() -> None:
    w = World()
    w.node()
    slow, quick, third = opened(w, idle_ns=900), opened(w, idle_ns=50), opened(w, idle_ns=50)
    w.happen(ev.SessionRenewed(w.now, quick))  # now behind the third
    order = []
    while deadline := w.scheduler.next_deadline():
        w.now = max(w.now, deadline) - 1
        for session in closing(w.plan()):
            order.append(session)
            w.happen(ev.SessionClosed(w.now, session, ""))
    assert order == [third, quick, slow] or order == [quick, third, slow]


# ---- a client that is away ---------------------------------------------------------------------


def test_after_the_grace_of_a_lost_client_only_sessions_without_work_close() -> None:
    w = World()
    w.node(cpus=1)
    idle, works, never = opened(w), opened(w), w.session(mem=2000)
    running, queued = w.submit(session=works), w.submit(session=works)
    loose = w.submit()
    w.plan()
    w.happen(ev.ClientLeft(w.now, 1, False, 100))
    assert w.scheduler.next_deadline() == 100
    w.now = 100
    made = w.plan()
    assert closing(made) == [idle] and replies(made) == {loose: ActionState.CANCELLED}
    assert never in ended(made)  # it had no sandbox yet
    w.happen(ev.SessionClosed(w.now, idle, ""))
    assert w.scheduler.next_deadline() == 0 and 1 in w.ledger.clients
    assert replies(w.finish(running)) == {running: ActionState.COMPLETED}
    assert started(w.plan()) == [queued]
    # its results are kept: the same client may still come for them
    assert w.ledger.by_uid["uid-1"] == 1 and running in w.ledger.actions
    w.finish(queued)
    assert closing(w.plan()) == [works]
    w.happen(ev.SessionClosed(w.now, works, ""))
    assert not w.ledger.clients and not w.ledger.actions and not w.ledger.sessions


def test_the_sessions_of_a_lost_client_are_not_looked_at_before_one_may_end(
        monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    w.node()
    opened(w), opened(w, grace_ns=50)
    w.happen(ev.ClientLeft(w.now, 1, False, 1000))
    looked = []
    ending_of = session_life.ending_of
    monkeypatch.setattr(session_life, "ending_of",
                        lambda *args: looked.append(w.now) or ending_of(*args))
    left_at = w.now
    for at in range(left_at + 10, left_at + 40, 10):
        w.now = at
        w.plan()
        assert w.scheduler.next_deadline() == left_at + 50
    assert not looked


def test_a_client_that_reconnects_keeps_its_session_that_is_still_busy() -> None:
    w = World()
    w.node()
    s = opened(w)
    action = w.submit(session=s)
    w.plan()
    w.happen(ev.ClientLeft(w.now, 1, False, 100))
    w.now = 5000
    w.plan()
    w.happen(ev.ClientJoined(w.now, 1, "uid-1", "test", 0, 1, "socket"))
    w.finish(action)
    assert closing(w.plan()) == [] and w.ledger.sessions[s].state is SessionState.IDLE


def test_each_session_has_its_own_grace_period_and_a_clean_leave_has_none() -> None:
    w = World()
    w.node()
    short, plain, long = opened(w, grace_ns=10), opened(w), opened(w, grace_ns=1000)
    w.happen(ev.ClientLeft(100, 1, False, 300))
    ends = []
    for at in (109, 110, 299, 300, 1099, 1100):
        w.now = at - 1
        made = closing(w.plan())
        ends += [(s, at) for s in made]
        for s in made:
            w.happen(ev.SessionClosed(at, s, ""))
    assert ends == [(short, 110), (plain, 300), (long, 1100)] and not w.ledger.clients
    w = World()
    w.node()
    s, busy = opened(w, grace_ns=1000), opened(w)
    action = w.submit(session=busy)
    w.plan()
    w.happen(ev.ClientLeft(w.now, 1, True, w.now))
    assert sorted(closing(w.plan())) == [s, busy]
    assert w.ledger.actions[action].forced_outcome.state is ActionState.CANCELLED


# ---- forks -------------------------------------------------------------------------------------


def test_a_fork_opens_on_its_origins_node_between_two_actions_of_the_origin() -> None:
    w = World()
    home = w.node(cpus=4)
    w.node(cpus=64)  # emptier, but the files are not there
    w.session(), w.plan()
    s = w.session(component="")
    w.plan()
    home = w.ledger.sessions[s].node
    before = w.submit(session=s)
    f = w.session(origin=s)
    after = w.submit(session=s)
    w.plan()
    assert w.ledger.sessions[f].state is SessionState.WAITING  # its origin is not even open
    w.happen(ev.SessionReady(w.now, s))
    assert started(w.plan()) == [before]
    assert w.ledger.sessions[f].state is SessionState.WAITING  # what came before it still runs
    w.finish(before)
    made = w.plan()
    assert [d.node for d in made if isinstance(d, de.OpenSession)] == [home]
    assert started(made) == [] and started(w.plan()) == []  # its files are being copied
    assert started(w.happen(ev.SessionReady(w.now, f)) + w.plan()) == [after]


def test_a_fork_waits_for_its_origins_node_and_blocks_no_session_elsewhere() -> None:
    w = World()
    home, away = w.node(mem=100), w.node(mem=100)
    s = opened(w, mem=60)
    assert w.ledger.sessions[s].node == home
    f, g = w.session(mem=60, origin=s), w.session(mem=50)
    w.plan()
    assert w.ledger.sessions[f].state is SessionState.WAITING
    assert w.ledger.sessions[g].node == away  # not held back by one who can never live there
    h = w.session(mem=40)
    w.plan()
    assert w.ledger.sessions[h].node == away  # home has room for it, which is kept for the fork
    action = w.submit(session=s)
    assert started(w.plan()) == [action]  # the origin goes on meanwhile
    w.finish(action)
    told = ended(w.happen(ev.SessionClosing(w.now, s, "")))
    assert f in told and "origin" in told[f]


def test_a_fork_of_an_unknown_session_is_refused_and_a_lost_node_ends_waiting_forks() -> None:
    w = World()
    node = w.node(mem=100)
    s = opened(w, mem=60)
    placer = w.scheduler.state.placer
    assert refusal_of_session(w.ledger, placer, SessionSpec(w.id(), origin=s)) == ""
    for spec in (SessionSpec(w.id(), origin=999), SessionSpec(1 << 60, origin=s)):
        assert refusal_of_session(w.ledger, placer, spec).startswith("origin: session")
    f = w.session(mem=60, origin=s)
    inside = w.submit(session=f)
    w.node(mem=500)
    w.plan()
    made = w.happen(ev.NodeLost(w.now, node, "gone"))
    assert set(ended(made)) == {s, f} and replies(made) == {inside: ActionState.CANCELLED}
    why = refusal_of_session(w.ledger, placer, SessionSpec(w.id(), origin=s))
    assert "closed" in why


# ---- chaos -------------------------------------------------------------------------------------


@pytest.mark.parametrize("placer", ["elastic", "first-fit", "static:2"])
@pytest.mark.parametrize("seed", range(8))
def test_random_session_histories_violate_no_invariant_and_leave_nothing(
        seed: int, placer: str) -> None:
    """Forks, renewals, idle ends and clients that come and go, at random. Every invariant is
    checked after every event, no action runs in an unknown session, and the journal alone gives the
    same state."""
    rng, w = random.Random(seed), World(placer)
    w.node(cpus=4, mem=300), w.node(cpus=4, mem=300)
    here = True
    for _ in range(500):
        w.now += rng.randrange(30)
        some = list(w.ledger.sessions)
        stands = [s for s in some if w.ledger.sessions[s].state is not SessionState.CLOSING
                  and client_of(s) == w.client]
        match rng.randrange(12):
            case 0 | 1 if here:
                w.session(mem=rng.choice([10, 100]), idle_ns=rng.choice([0, 80, 200]),
                          grace_ns=rng.choice([-1, 10, 500]), parallel=rng.random() < .3,
                          origin=rng.choice([0, *stands]))
            case 2 | 3 | 4 if here and stands:
                w.submit(rng.choice([1, (1, 2)]), rng.choice(stands))
            case 5 if some:
                w.happen(ev.SessionRenewed(w.now, rng.choice(some)))
            case 6 | 7 if w.ledger.leases:
                w.finish(rng.choice(list(w.ledger.leases.values())).action)
            case 8:
                for s in some:
                    if w.ledger.sessions[s].state is SessionState.OPENING and rng.random() < .7:
                        w.happen(ev.SessionReady(w.now, s))
            case 9:
                for s in some:
                    if s in w.ledger.sessions and (
                            w.ledger.sessions[s].state is SessionState.CLOSING
                            and not w.ledger.sessions[s].leases):
                        w.happen(ev.SessionClosed(w.now, s, ""))
            case 10 if here:
                w.happen(ev.ClientLeft(w.now, w.client, False, w.now + 50))
                here = False
            case 11 if not here:
                uid = f"uid-{w.client}"
                if uid not in w.ledger.by_uid:  # expired: it comes back as somebody new
                    w.client, uid = w.ledger.next_client, f"uid-{w.ledger.next_client}"
                w.happen(ev.ClientJoined(w.now, w.client, uid, "test", 0, 1, "socket"))
                here = True
        w.plan()
        deadline = w.scheduler.next_deadline()
        assert not deadline or deadline > w.now, "a deadline passed unused: the timer would spin"
    if here:
        w.happen(ev.ClientLeft(w.now, w.client, True, w.now))
    for _ in range(50):
        for s in list(w.ledger.sessions):
            if s in w.ledger.sessions and not w.ledger.sessions[s].leases:
                w.happen(ev.SessionClosed(w.now, s, ""))
        for lease in list(w.ledger.leases.values()):
            w.finish(lease.action, ActionState.CANCELLED)
        w.plan()
    assert not w.ledger.sessions and not w.ledger.clients and not w.ledger.actions
    assert all(n.free_mem_mib == 300 and n.cores.free == 4 for n in w.ledger.up_nodes())
    again = Scheduler(make_placer("fcfs:1"))
    for event in w.events:
        again.handle(event)
    again.ledger.check()
    assert not again.ledger.sessions and again.ledger.next_lease == w.ledger.next_lease
