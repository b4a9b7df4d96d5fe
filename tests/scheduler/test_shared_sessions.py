"""Sessions that several clients use: who may attach and act, in which order, and when they end."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import client_of, mint
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.session_token import attach_token, hash_of
from tangram_hpc.domain.states import ENDED, ActionState, SessionState
from tangram_hpc.scheduler.handlers import attachment_events
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import refusal, refusal_of_session
from tangram_hpc.scheduler.policy.sharing import attach_decision, may_close, may_use
from tangram_hpc.scheduler.scheduler import Scheduler

SECRET = "secret-of-{}"


def join(w: World, client: int) -> int:
    w.happen(ev.ClientJoined(w.now, client, f"uid-{client}", f"c{client}", -1, 0, "socket"))
    return client


def share(w: World, name: str = "s", ready: bool = True, **fields) -> int:
    """A shared session of the world's client; its secret is `SECRET` with its name."""
    secret = SECRET.format(name)
    spec = SessionSpec(w.id(), name, fields.pop("mem", 10), attach_hash=hash_of(
        attach_token(secret)), close_hash=hash_of(secret), **fields)
    assert refusal_of_session(w.ledger, w.scheduler.state.placer, spec) == ""
    w.happen(ev.SessionRequested(w.now, spec))
    w.plan()
    if ready:
        w.happen(ev.SessionReady(w.now, spec.id))
    return spec.id


def attach(w: World, session: int, client: int, may_close: bool = False, hold: bool = False
           ) -> None:
    w.happen(ev.SessionAttached(w.now, session, client, may_close, hold))


def submit_as(w: World, client: int, session: int, number: int, **fields) -> int:
    action = Action(mint(client, 1000 + number), "x", Kind.EXEC, (1,), session=session, **fields)
    w.now += 1
    w.happen(ev.ActionSubmitted(w.now, action))
    return action.id


def leave(w: World, client: int, bye: bool = False, grace: int = 10) -> list[de.Decision]:
    until = w.now + (0 if bye else grace)
    return w.happen(ev.ClientLeft(w.now, client, bye, until))


def closed(w: World, session: int) -> bool:
    """Whether the session is to end, or has ended."""
    entry = w.ledger.sessions.get(session)
    return entry is None or entry.state is SessionState.CLOSING


# ---- tokens ------------------------------------------------------------------------------------


def test_each_token_gives_its_right_and_anything_else_the_answer_to_an_unknown_name() -> None:
    w = World()
    w.node()
    s = share(w, "episode")
    secret = SECRET.format("episode")
    uses = attach_decision(w.ledger, "episode", attach_token(secret), False)
    closes = attach_decision(w.ledger, "episode", secret, True)
    assert uses.session is closes.session is w.ledger.sessions[s]
    assert (uses.may_close, closes.may_close) == (False, True)
    unknown = attach_decision(w.ledger, "no such name", secret, False)
    assert unknown.session is None and not unknown.ended and "this name and token" in unknown.why
    plain = w.session()  # named "s" and not shared
    for name, token in (("episode", "wrong"), ("episode", ""), ("s", ""), ("s", secret),
                        ("episode", hash_of(secret)), ("", ""), ("episode", "\ud800")):
        assert attach_decision(w.ledger, name, token, True) == unknown, (name, token)
    assert plain in w.ledger.sessions
    refused = attach_decision(w.ledger, "episode", attach_token(secret), True)
    assert refused.session is None and refused.why.startswith("hold: ")


def test_the_holder_of_a_token_is_told_why_the_session_ended_and_nobody_else() -> None:
    w = World()
    w.node()
    s = share(w, "episode")
    secret = SECRET.format("episode")
    w.happen(ev.SessionClosing(w.now, s, "idle for 5 s"))
    for token in (secret, attach_token(secret)):
        told = attach_decision(w.ledger, "episode", token, False)
        assert told.ended and told.why == "attach: session 1.1 ended: idle for 5 s"
    w.happen(ev.SessionClosed(w.now, s, ""))
    for token in (secret, attach_token(secret)):
        told = attach_decision(w.ledger, "episode", token, False)
        assert told.ended and told.why == "attach: session 1.1 ended: idle for 5 s"
    other = attach_decision(w.ledger, "episode", "wrong", False)
    assert not other.ended and "ended" not in other.why
    again = share(w, "another")  # its name is free: the old tokens do not open the new session
    assert attach_decision(w.ledger, "another", secret, False).session is None
    assert w.ledger.sessions[again].attached == {}


def test_what_is_remembered_of_ended_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment_events, "ENDED_MAX", 6)
    w = World()
    w.node()
    for number in range(5):
        s = share(w, f"n{number}")
        w.happen(ev.SessionClosing(w.now, s, ""))
        w.happen(ev.SessionClosed(w.now, s, ""))
    assert len(w.ledger.ended_shares) == 6
    told = [attach_decision(w.ledger, "x", SECRET.format(f"n{n}"), False).ended for n in range(5)]
    assert told == [False, False, True, True, True]


def test_a_name_is_taken_only_while_a_shared_session_has_it() -> None:
    w = World()
    w.node()
    placer = w.scheduler.state.placer
    w.session()  # named "s", not shared: listings may show a name twice
    s = share(w, "s")
    twin = SessionSpec(w.id(), "s", attach_hash="a" * 64, close_hash="b" * 64)
    taken = refusal_of_session(w.ledger, placer, twin)
    assert taken.startswith("name: 's' is taken by session 1.2")
    w.happen(ev.SessionClosing(w.now, s, ""))
    assert refusal_of_session(w.ledger, placer, twin).startswith("name: ")
    w.happen(ev.SessionClosed(w.now, s, ""))
    assert refusal_of_session(w.ledger, placer, twin) == ""


@pytest.mark.parametrize(("fields", "why"), [
    ({"outlives": True, "ttl_ns": 5}, "outlives: nobody else could reach"),
    ({"outlives": True, "attach_hash": "a" * 64, "close_hash": "b" * 64}, "outlives: nothing"),
    ({"outlives": True, "attach_hash": "a" * 64, "close_hash": "b" * 64, "idle_ns": 5,
      "background": "run"}, "outlives: nothing"),
    ({"attach_hash": "a" * 64}, "shared: "), ({"ttl_ns": -1}, "ttl_s: "),
    ({"attach_hash": "a" * 64, "close_hash": "b" * 64, "name": ""}, "name: "),
    ({"attach_hash": "a" * 64, "close_hash": "b" * 64, "name": "x" * 201}, "name: ")])
def test_what_cannot_be_shared_is_refused_in_one_line(fields: dict, why: str) -> None:
    w = World()
    w.node()
    spec = SessionSpec(w.id(), **{"name": "n", **fields})
    said = refusal_of_session(w.ledger, w.scheduler.state.placer, spec)
    assert said.startswith(why) and "\n" not in said


# ---- what an attached client may do ------------------------------------------------------------


def test_only_the_own_client_and_attached_ones_use_a_session() -> None:
    w = World()
    w.node()
    s, placer = share(w), w.scheduler.state.placer
    other = join(w, 2)
    action = Action(mint(other, 1), "x", session=s)
    fork = SessionSpec(mint(other, 2), "f", origin=s)
    assert "another client's" in refusal(w.ledger, placer, action)
    assert "another client's" in refusal_of_session(w.ledger, placer, fork)
    attach(w, s, other)
    assert refusal(w.ledger, placer, action) == ""
    assert refusal_of_session(w.ledger, placer, fork) == ""
    entry = w.ledger.sessions[s]
    assert [may_close(c, entry) for c in (1, 2, 3)] == [True, False, False]
    assert [may_use(c, entry) for c in (1, 2, 3)] == [True, True, False]
    attach(w, s, other, may_close=True)
    assert may_close(other, entry)
    w.happen(ev.SessionDetached(w.now, s, other))
    assert refusal(w.ledger, placer, action) and not may_close(other, entry)


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    w = World()
    w.node(cpus=4)
    s = share(w)
    for client in (2, 3):
        attach(w, s, join(w, client))
    many = [submit_as(w, 1, s, n) for n in range(6)]
    w.plan()  # the first runs
    few = [submit_as(w, 2, s, n) for n in range(2)] + [submit_as(w, 3, s, 0)]
    order = [many[0]]
    while w.ledger.leases:
        w.finish(order[-1])
        order += started(w.plan())
    assert order == [many[0], many[1], few[0], few[2], many[2], few[1], *many[3:]]


def test_a_waiting_head_is_not_overtaken_by_a_client_that_comes_later() -> None:
    w = World()
    w.node(cpus=1)
    s, blocker = share(w), w.submit()
    w.plan()
    attach(w, s, join(w, 2))
    first = submit_as(w, 1, s, 0)
    submit_as(w, 2, s, 0)
    assert started(w.plan()) == []  # the core is taken: both wait, the first is in the ready queue
    w.finish(blocker)
    assert started(w.plan()) == [first]


def test_a_fork_begins_after_what_its_own_client_submitted_before_it() -> None:
    w = World()
    w.node(cpus=4)
    s = share(w)
    attach(w, s, join(w, 2))
    runs, before = submit_as(w, 2, s, 0), submit_as(w, 2, s, 1)
    w.plan()
    own = [submit_as(w, 1, s, n) for n in range(3)]
    fork = SessionSpec(mint(2, 1002), "f", 10, origin=s)
    w.happen(ev.SessionRequested(w.now, fork))
    late = submit_as(w, 2, s, 3)
    order, current = [], runs
    while w.ledger.sessions[fork.id].state is SessionState.WAITING:
        w.finish(current)
        order += started(w.plan())
        current = order[-1] if order else runs
    assert order == [before] and late not in order  # nor does it wait for another client's
    w.happen(ev.SessionReady(w.now, fork.id))
    w.drain()
    assert all(w.ledger.actions[a].state in ENDED for a in (*own, late))


def test_every_client_of_a_session_is_told_of_its_end() -> None:
    w = World()
    w.node()
    s = share(w)
    for client in (2, 3):
        attach(w, s, join(w, client))
    w.happen(ev.SessionDetached(w.now, s, 2))
    w.happen(ev.SessionClosing(w.now, s, "closed by client 3 (c3)"))
    made = w.happen(ev.SessionClosed(w.now, s, ""))
    assert made == [de.AnnounceSessionEnd(s, "closed by client 3 (c3)", False, (3,))]
    assert not w.ledger.clients[3].attached


def test_who_detaches_takes_its_own_actions_along_but_for_named_ones() -> None:
    w = World()
    w.node()
    s = share(w, parallel=True)
    attach(w, s, join(w, 2))
    mine, theirs = submit_as(w, 1, s, 0), submit_as(w, 2, s, 0)
    w.plan()
    named = submit_as(w, 2, s, 1, once="score")
    w.happen(ev.SessionDetached(w.now, s, 2))
    cancelled = {a for a, e in w.ledger.actions.items() if e.forced_outcome is not None}
    assert cancelled == {theirs}
    w.finish(theirs, ActionState.CANCELLED)
    w.plan()
    assert all(w.ledger.actions[a].lease for a in (mine, named))
    assert w.happen(ev.SessionDetached(w.now, s, 2)) == []  # a second time


# ---- clients that go away ----------------------------------------------------------------------


def test_a_client_that_dies_loses_its_own_actions_alone() -> None:
    w = World()
    w.node(cpus=1)
    s = share(w)
    attach(w, s, join(w, 2))
    theirs, waits = submit_as(w, 2, s, 0), submit_as(w, 2, s, 1)
    w.plan()
    mine = submit_as(w, 1, s, 0)
    leave(w, 2)
    w.plan()
    assert 2 in w.ledger.sessions[s].attached  # it may come back within its grace
    assert w.ledger.actions[theirs].forced_outcome is None
    w.now = w.scheduler.next_deadline()
    w.now -= 1
    assert replies(w.plan()) == {waits: ActionState.CANCELLED}
    w.finish(theirs, ActionState.CANCELLED)
    assert started(w.plan()) == [mine] and 2 not in w.ledger.clients
    assert not closed(w, s) and not w.ledger.sessions[s].attached


def test_a_client_that_comes_back_in_time_is_still_attached() -> None:
    w = World()
    w.node()
    s = share(w)
    attach(w, s, join(w, 2))
    leave(w, 2, grace=100)
    w.plan()
    join(w, 2)
    w.now += 1000
    w.plan()
    assert list(w.ledger.sessions[s].attached) == [2]


@pytest.mark.parametrize("bye", [False, True])
def test_a_session_ends_with_its_own_client_though_others_are_attached(bye: bool) -> None:
    w = World()
    w.node()
    s = share(w)
    attach(w, s, join(w, 2))
    leave(w, 1, bye)
    w.now += 20
    made = w.plan()
    assert [d for d in made if isinstance(d, de.CloseSession)]
    assert w.ledger.sessions[s].closing == "its client went away"


def test_work_of_an_attached_client_keeps_the_session_of_a_lost_client_until_it_has_ended() -> None:
    w = World()
    w.node()
    s = share(w)
    attach(w, s, join(w, 2))
    scores = submit_as(w, 2, s, 0)
    w.plan()
    leave(w, 1)
    w.now += 1000
    w.plan()
    assert not closed(w, s)
    w.finish(scores)
    w.plan()
    assert closed(w, s)


@pytest.mark.parametrize("bye", [False, True])
def test_a_held_session_ends_when_the_last_holder_leaves(bye: bool) -> None:
    w = World()
    w.node()
    s = share(w)
    for client, hold in ((2, True), (3, False)):
        attach(w, s, join(w, client), hold, hold)
    leave(w, 1, bye)
    w.now += 1000
    w.plan()
    assert not closed(w, s) and not w.ledger.clients[1].uid  # the client is forgotten
    w.happen(ev.SessionDetached(w.now, s, 3))
    w.plan()
    assert not closed(w, s)
    leave(w, 2, bye)
    w.now += 1000
    w.plan()
    assert closed(w, s)
    w.happen(ev.SessionClosed(w.now, s, ""))
    w.plan()
    assert list(w.ledger.clients) == [3] and not w.ledger.ownerless


@pytest.mark.parametrize("bye", [False, True])
def test_a_lost_client_takes_its_actions_in_a_held_session_along(bye: bool) -> None:
    w = World()
    w.node(cpus=1)
    s = share(w)
    runs, waits = submit_as(w, 1, s, 0), submit_as(w, 1, s, 1)
    attach(w, s, join(w, 2), True, True)
    w.plan()
    leave(w, 1, bye)
    if not bye:
        w.plan()
        assert w.ledger.actions[runs].forced_outcome is None  # it may come back within its grace
        w.now = w.scheduler.next_deadline() - 1
    assert replies(w.plan()) == {waits: ActionState.CANCELLED}
    assert w.ledger.actions[runs].forced_outcome is not None
    theirs = submit_as(w, 2, s, 0)
    w.finish(runs, ActionState.CANCELLED)
    assert started(w.plan()) == [theirs] and not closed(w, s) and 1 in w.ledger.clients
    assert not w.ledger.clients[1].uid and not w.ledger.clients[1].actions


def test_what_waits_for_a_lost_client_does_not_keep_a_held_session_after_its_holder() -> None:
    """The broker was started again, and the owner, which alone has the call, did not come back."""
    w = World()
    w.node(cpus=1)
    s = share(w)
    submit_as(w, 1, s, 0)
    attach(w, s, join(w, 2), True, True)
    w.happen(ev.BrokerStarted(w.now, "1", "first-fit", "none", await_until=w.now + 10))
    w.happen(ev.NodeRejoined(w.now, 1))
    w.happen(ev.SessionReady(w.now, s))
    join(w, 2)
    w.now += 20
    w.plan()
    w.plan()
    assert not w.ledger.clients[1].actions and not closed(w, s)
    leave(w, 2, True)
    w.plan()
    assert closed(w, s)


# ---- time-to-live and outliving ----------------------------------------------------------------


def test_a_session_that_outlives_its_client_ends_with_its_time_to_live_whatever_runs() -> None:
    w = World()
    w.node()
    s = share(w, outlives=True, ttl_ns=500)
    opened = w.ledger.sessions[s].opened_at
    attach(w, s, join(w, 2))
    agent = submit_as(w, 1, s, 0)
    w.plan()
    leave(w, 1)
    w.now += 20
    w.plan()
    entry = w.ledger.actions[agent]
    assert entry.forced_outcome is not None and entry.forced_outcome.reason.endswith("went away")
    w.finish(agent, ActionState.CANCELLED)
    w.plan()
    assert not w.ledger.clients[1].uid and not closed(w, s)
    scorer = submit_as(w, 2, s, 0)
    w.plan()
    assert w.scheduler.next_deadline() == opened + 500
    w.now = opened + 498
    w.plan()
    assert not closed(w, s)
    w.plan()
    assert w.ledger.sessions[s].closing == "its time-to-live of 5e-07 s is over"
    assert w.ledger.actions[scorer].forced_outcome is not None
    w.finish(scorer, ActionState.CANCELLED)
    w.happen(ev.SessionClosed(w.now, s, ""))
    assert 1 not in w.ledger.clients and not w.ledger.ttl_deadlines.next_end()


def test_the_time_to_live_counts_from_the_opening_and_bounds_the_wait_for_it_too() -> None:
    w = World()
    w.node(mem=10)
    first = share(w, "first", mem=10)
    waits = share(w, "waits", ready=False, mem=10, ttl_ns=300)
    asked = w.now
    w.now += 200
    w.happen(ev.SessionClosing(w.now, first, ""))
    w.happen(ev.SessionClosed(w.now, first, ""))
    w.plan()
    w.happen(ev.SessionReady(w.now, waits))
    assert w.scheduler.next_deadline() == w.now + 300 > asked + 300
    never = share(w, "never", ready=False, mem=10, ttl_ns=100)
    w.now += 120
    w.plan()
    assert closed(w, never) and not closed(w, waits)
    assert "time-to-live" in attach_decision(w.ledger, "never", SECRET.format("never"), False).why


def test_idleness_ends_a_session_that_outlives_its_client_and_a_stall_moves_its_end() -> None:
    w = World()
    w.node()
    idle = share(w, "idle", outlives=True, idle_ns=100)
    lives = share(w, "lives", outlives=True, ttl_ns=200)
    leave(w, 1, bye=True)
    w.plan()
    assert not closed(w, idle) and not closed(w, lives)
    w.now += 50
    w.happen(ev.BrokerStalled(w.now, 50))
    w.now += 60
    w.plan()
    assert not closed(w, idle)
    w.now += 60
    w.plan()
    assert closed(w, idle) and not closed(w, lives)
    w.now += 40  # its 200 ns are over, but for the stall
    w.plan()
    assert not closed(w, lives)
    w.now += 40
    w.plan()
    assert closed(w, lives)


def test_a_restart_of_the_broker_ends_shared_sessions_like_all_others() -> None:
    w = World()
    w.node()
    w.happen(ev.BrokerStarted(w.now, "1", "first-fit", "none"))
    s = share(w, "s", outlives=True, ttl_ns=10**9)
    attach(w, s, join(w, 2), hold=True, may_close=True)
    submit_as(w, 2, s, 0)
    w.plan()
    w.happen(ev.BrokerStarted(w.now, "1", "first-fit", "none"))
    assert not w.ledger.sessions and not w.ledger.clients and not w.ledger.shared
    assert not w.ledger.ttl_deadlines.next_end()
    told = attach_decision(w.ledger, "s", SECRET.format("s"), False)
    assert told.ended and "the broker was started again" in told.why


# ---- random histories --------------------------------------------------------------------------


class Model:
    """What is expected of the sessions, in the plainest words: who is attached and who is left."""

    def __init__(self) -> None:
        self.attached: dict[int, dict[int, bool]] = {}  # session -> client -> holds
        self.gone: set[int] = set()

    def ends(self, w: World, session: int) -> bool:
        """Whether nobody is left for whom the session stays open."""
        entry = w.ledger.sessions[session]
        return (client_of(session) in self.gone and not entry.spec.outlives
                and not any(self.attached[session].values()))


def step(w: World, rng: random.Random, model: Model, number: int) -> None:
    """One random move that a driver could make."""
    clients = [c for c in w.ledger.clients if w.ledger.clients[c].uid and c not in model.gone]
    live = [s for s, e in w.ledger.sessions.items() if e.state in (
        SessionState.WAITING, SessionState.OPENING, SessionState.IDLE, SessionState.BUSY)]
    w.now += rng.choice((0, 1, 5, 40))
    client = rng.choice(clients) if clients else join(w, w.ledger.next_client)
    session = rng.choice(live) if live else 0
    match rng.randrange(9):
        case 0:
            w.client = client
            w.counter = number
            lives = rng.random() < 0.4
            s = share(w, f"n{number}", ready=rng.random() < 0.8, parallel=rng.random() < 0.2,
                      outlives=lives, ttl_ns=rng.choice((60, 300)) if lives else 0,
                      idle_ns=rng.choice((0, 100)))
            model.attached[s] = {}
        case 1 | 2 if session and client_of(session) != client:
            hold = rng.random() < 0.3
            before = model.attached[session].get(client, False)
            attach(w, session, client, hold or before, hold or before)
            model.attached[session][client] = hold or before
        case 3 if session:
            mine = [s for s in live if client in model.attached[s]]
            for s in mine[:1]:
                w.happen(ev.SessionDetached(w.now, s, client))
                del model.attached[s][client]
                assert not any(client_of(a) == client for a in w.ledger.sessions[s].waiting)
        case 4 if session and may_close(client, w.ledger.sessions[session]):
            w.happen(ev.SessionClosing(w.now, session, "" if client_of(session) == client else "x"))
        case 5:
            leave(w, client, rng.random() < 0.3)
        case 6:
            for c in list(w.ledger.disconnected):
                if not w.ledger.disconnected[c].bye and rng.random() < 0.3:
                    w.happen(ev.ClientJoined(w.now, c, w.ledger.clients[c].uid, "", -1, 0, "mpi"))
        case 7:
            join(w, w.ledger.next_client)
        case _ if session and may_use(client, w.ledger.sessions[session]):
            submit_as(w, client, session, number)


def settle(w: World, rng: random.Random) -> None:
    """What workers and time do: attempts end, sandboxes come and go."""
    for lease in list(w.ledger.leases.values()):
        forced = w.ledger.actions[lease.action].forced_outcome is not None
        if forced or rng.random() < 0.4:
            w.finish(lease.action, ActionState.CANCELLED if forced else ActionState.COMPLETED)
    for s, entry in list(w.ledger.sessions.items()):
        if entry.state is SessionState.OPENING:
            w.happen(ev.SessionReady(w.now, s))
        elif entry.state is SessionState.CLOSING and not entry.leases:
            w.happen(ev.SessionClosed(w.now, s, ""))


@pytest.mark.parametrize("seed", range(25))
def test_random_histories_keep_the_ledgers_laws_and_agree_with_the_model(seed: int) -> None:
    rng, w, model = random.Random(seed), World("elastic"), Model()
    w.node(cpus=4, mem=200)
    for client in (2, 3, 4):
        join(w, client)
    for number in range(1, 250):
        step(w, rng, model, number)
        w.plan()
        model.gone = {c for c, gone in w.ledger.disconnected.items() if gone.until <= w.now} | {
            c for c, e in w.ledger.clients.items() if not e.uid}
        for s in model.attached:
            for client in [c for c in model.attached[s] if c in model.gone
                           or c not in w.ledger.clients]:
                del model.attached[s][client]
        for s, entry in w.ledger.sessions.items():
            if entry.state is SessionState.CLOSING:
                continue
            assert set(entry.attached) == set(model.attached[s]), s
            if model.ends(w, s) and not entry.works:
                w.plan()
                assert closed(w, s), f"{s} outlived everybody for whom it was open"
        for action, entry in w.ledger.actions.items():
            assert entry.state not in ENDED or client_of(action) in w.ledger.clients
        settle(w, rng)
    other = Scheduler(make_placer("elastic"))
    for event in w.events:
        other.handle(event)
    for part in ("clients", "sessions", "shared", "ended_shares", "ownerless", "ttl_deadlines",
                 "idle_deadlines", "disconnected", "session_queue", "actions", "leases"):
        assert getattr(other.ledger, part) == getattr(w.ledger, part), part  # and it never plans
    assert list(other.ledger.sessions) == list(w.ledger.sessions)
    finish_all(w)


def finish_all(w: World) -> None:
    """Lets everybody go; nothing may be left behind."""
    for client in list(w.ledger.clients):
        if w.ledger.clients[client].uid and client not in w.ledger.disconnected:
            leave(w, client, bye=True)
    rng = random.Random(1)
    for _ in range(60):
        w.now += 50
        w.plan()
        settle(w, rng)
    assert not w.ledger.sessions and not w.ledger.clients and not w.ledger.leases
    assert not w.ledger.shared and not w.ledger.ownerless and not w.ledger.actions
