"""The scheduler by stimulus and decision: invariants of leases, sessions, nodes and clients."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ENDED, ActionState, SessionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import refusal, refusal_of_session
from tangram_hpc.scheduler.scheduler import Scheduler


def test_a_lease_holds_its_cores_until_it_is_released() -> None:
    w = World()
    w.node(cpus=2)
    a, b = w.submit(2), w.submit(1)
    assert started(w.plan()) == [a]
    assert replies(w.finish(a, clean=False)) == {a: ActionState.COMPLETED}
    assert started(w.plan()) == []  # the result is known, the cores are not free yet
    w.happen(ev.LeaseReleased(w.now, 1))
    assert started(w.plan()) == [b]


def test_the_placer_is_not_asked_while_there_is_nothing_to_place(
        monkeypatch: pytest.MonkeyPatch) -> None:
    w = World("elastic")
    w.node()
    placer = w.scheduler.state.placer
    asked, place = list[int](), placer.place
    monkeypatch.setattr(placer, "place", lambda view: (asked.append(view.now_ns), place(view))[1])
    w.plan()
    assert asked == []
    action = w.submit()
    assert started(w.plan()) == [action] and asked == [w.now]
    w.finish(action)
    w.plan()
    assert len(asked) == 1 and not w.scheduler.next_deadline()
    w.session()
    w.plan()
    assert len(asked) == 2, "to open the session"


def test_a_late_report_on_a_released_lease_is_ignored() -> None:
    w = World()
    w.node()
    a = w.submit()
    w.plan()
    lease = w.lease_of(a)
    w.finish(a)
    assert w.happen(ev.LeaseFinished(9, lease, Outcome(ActionState.FAILED), True)) == []
    assert w.happen(ev.LeaseReleased(9, lease)) == []
    assert w.plan() == []


def test_the_first_waiting_action_blocks_others_with_fcfs_and_not_with_first_fit() -> None:
    for placer, expected in (("fcfs:4", []), ("first-fit", [2])):
        w = World(placer)
        w.node(cpus=4)
        holder = w.submit(3)
        w.plan()
        big, small = w.submit(4), w.submit(1)
        assert started(w.plan()) == [small][: len(expected)]
        w.finish(holder)
        if placer == "fcfs:4":
            assert started(w.plan()) == [big]


def test_fcfs_takes_the_largest_degree_up_to_k() -> None:
    w = World("fcfs:4")
    w.node(cpus=16)
    a, b, c = w.submit((1, 2, 4, 8)), w.submit((2, 3)), w.submit((8, 16))
    w.plan()
    sizes = [len(w.ledger.leases[w.lease_of(x)].cores) for x in (a, b, c)]
    assert sizes == [4, 3, 8]


def test_a_session_runs_one_action_at_a_time_and_holds_memory_but_no_cores() -> None:
    w = World()
    node = w.node(cpus=4, mem=100)
    s = w.session(mem=60)
    first, second = w.submit(session=s), w.submit(session=s)
    assert [type(d) for d in w.plan()] == [de.OpenSession]
    assert w.ledger.nodes[node].free_mem_mib == 40
    assert w.ledger.nodes[node].cores.free == 4
    assert isinstance(w.happen(ev.SessionReady(w.now, s))[0], de.AnnounceSession)
    assert started(w.plan()) == [first]
    assert started(w.plan()) == []
    w.finish(first)
    assert started(w.plan()) == [second]
    w.finish(second)
    w.happen(ev.SessionClosing(w.now, s, ""))
    w.happen(ev.SessionClosed(w.now, s, ""))
    assert w.ledger.nodes[node].free_mem_mib == 100 and not w.ledger.sessions


def test_sessions_wait_for_memory_in_order() -> None:
    w = World()
    w.node(mem=100)
    one, two, three = w.session(80), w.session(50), w.session(10)
    w.plan()
    assert [w.ledger.sessions[s].state for s in (one, two, three)] == [
        SessionState.OPENING, SessionState.WAITING, SessionState.WAITING]
    w.happen(ev.SessionClosing(w.now, one, ""))
    w.happen(ev.SessionClosed(w.now, one, ""))
    w.plan()
    assert w.ledger.sessions[three].state is SessionState.OPENING


def test_sessions_spread_over_nodes() -> None:
    w = World()
    nodes = [w.node(cpus=4), w.node(cpus=2)]
    sessions = [w.session() for _ in range(6)]
    w.plan()
    homes = [w.ledger.sessions[s].node for s in sessions]
    assert [homes.count(n) for n in nodes] == [4, 2]


def test_static_reserves_for_the_session_and_admits_in_order() -> None:
    w = World("static:2")
    w.node(cpus=4)
    a, b, c = w.session(), w.session(), w.session()
    w.plan()
    for s in (a, b):
        w.happen(ev.SessionReady(w.now, s))
    run = w.submit((1, 2, 4), session=a)
    assert started(w.plan()) == [run]
    assert len(w.ledger.leases[w.lease_of(run)].cores) == 2
    assert w.ledger.sessions[c].state is SessionState.WAITING
    loose = w.submit(1)
    assert started(w.plan()) == []  # all cores are reserved
    w.happen(ev.SessionClosing(w.now, b, ""))
    w.happen(ev.SessionClosed(w.now, b, ""))
    w.plan()
    assert w.ledger.sessions[c].state is SessionState.OPENING
    assert w.ledger.actions[loose].state is ActionState.PENDING


def test_gpus_and_memory_are_lent_and_come_back() -> None:
    w = World()
    node = w.node(cpus=4, mem=100, gpus=2)
    a, b = w.submit(1, gpus=2, mem_mib=50), w.submit(1, gpus=1)
    assert started(w.plan()) == [a]
    assert w.ledger.leases[1].gpus == (0, 1)
    w.finish(a)
    assert started(w.plan()) == [b]
    w.finish(b)
    assert w.ledger.nodes[node].gpus.free == 2 and w.ledger.nodes[node].free_mem_mib == 100


def test_an_action_runs_in_the_component_that_it_names() -> None:
    w = World()
    w.node(component="cpu")
    gpu = w.node(component="gpu")
    a = w.submit(component="gpu")
    w.plan()
    assert w.ledger.leases[1].node == gpu and w.ledger.leases[1].action == a


def test_lost_node_ends_or_repeats_its_actions_and_loses_its_sessions() -> None:
    w = World()
    node = w.node(cpus=4)
    s = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    once, again = w.submit(attempts=1), w.submit(attempts=2)
    inside, behind = w.submit(session=s), w.submit(session=s)
    w.plan()
    made = w.happen(ev.NodeLost(w.now, node, "gone"))
    assert replies(made) == {once: ActionState.NODE_FAIL, inside: ActionState.NODE_FAIL,
                             behind: ActionState.CANCELLED}
    assert any(isinstance(d, de.AnnounceSessionEnd) and "gone" in d.reason for d in made)
    assert started(w.plan()) == []
    w.node()
    assert started(w.plan()) == [again]
    assert w.ledger.actions[again].attempt == 2


def test_cancelling_ends_a_pending_action_at_once_and_kills_a_running_one() -> None:
    w = World()
    w.node(cpus=1)
    running, waiting = w.submit(attempts=3), w.submit()
    w.plan()
    assert replies(w.happen(ev.ActionCancelled(w.now, waiting, "enough"))) == {
        waiting: ActionState.CANCELLED}
    made = w.happen(ev.ActionCancelled(w.now, running, "enough"))
    assert isinstance(made[0], de.KillLease)
    # its node dies before it could say so: it is not started again
    assert replies(w.happen(ev.NodeLost(w.now, 1, "gone"))) == {running: ActionState.NODE_FAIL}
    assert w.happen(ev.ActionCancelled(w.now, running, "late")) == []


def test_a_lost_client_keeps_everything_for_its_grace() -> None:
    w = World()
    w.node(cpus=1)
    s = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    a, b = w.submit(), w.submit()
    w.plan()
    w.happen(ev.ClientLeft(w.now, 1, False, 100))
    assert w.scheduler.next_deadline() == 100
    w.now = 50
    w.plan()
    assert w.ledger.actions[a].lease and b in w.ledger.ready and s in w.ledger.sessions
    w.happen(ev.ClientJoined(60, 1, "uid-1", "test", 0, 1, "socket"))
    assert w.scheduler.next_deadline() == 0
    w.happen(ev.ClientLeft(w.now, 1, False, 100))
    w.now = 100
    made = w.plan()
    assert replies(made) == {b: ActionState.CANCELLED}
    assert {type(d) for d in made} >= {de.CloseSession, de.KillLease}
    w.finish(a, ActionState.CANCELLED)
    w.happen(ev.SessionClosed(w.now, s, ""))
    assert not w.ledger.clients and not w.ledger.actions and not w.ledger.sessions


def test_a_client_that_expires_at_the_same_time_does_not_stop_a_placement() -> None:
    w = World()
    w.node()
    w.happen(ev.ClientJoined(w.now, 2, "uid-2", "other", 0, 1, "socket"))
    w.happen(ev.ClientLeft(w.now, 2, True, w.now))
    a = w.submit()
    assert started(w.plan()) == [a]


def test_closing_a_session_cancels_its_pending_actions() -> None:
    w = World()
    w.node()
    s = w.session()
    early = w.submit(session=s)
    made = w.happen(ev.SessionClosing(w.now, s, ""))  # not even placed
    assert replies(made) == {early: ActionState.CANCELLED} and not w.ledger.sessions
    placer = w.scheduler.state.placer
    assert refusal(w.ledger, placer, Action(5, "x", session=s)).startswith("session:")


def test_a_file_action_needs_no_unit_and_starts_at_once() -> None:
    w = World("fcfs:1")
    w.node(cpus=1)
    s = w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    w.submit(1), w.submit(1)
    w.plan()
    write = w.submit((0,), session=s)
    assert started(w.plan()) == [write]


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"degrees": (99,)}, "cpus"), ({"mem_mib": 5000}, "mem"), ({"gpus": 1}, "gpus"),
     ({"component": "moon"}, "component"), ({"degrees": (2, 1)}, "cpus"), ({"degrees": ()}, "cpus"),
     ({"mem_mib": -1}, "negative")],
)
def test_an_infeasible_action_is_refused_at_once_naming_the_field(fields, named) -> None:
    w = World()
    w.node()
    assert named in refusal(w.ledger, w.scheduler.state.placer, Action(1, "x", **fields))
    assert refusal(w.ledger, w.scheduler.state.placer, Action(1, "x")) == ""


def test_an_infeasible_action_waits_until_all_nodes_have_joined() -> None:
    w = World()
    w.node(complete=False)
    wait, fits = w.submit(9), w.submit(1)
    w.plan()
    assert replies(w.happen(ev.NodesComplete(w.now, 1))) == {wait: ActionState.FAILED}
    assert w.ledger.actions[fits].lease
    placer = w.scheduler.state.placer
    assert "mem" in refusal_of_session(w.ledger, placer, SessionSpec(9, "", 10**6))


@pytest.mark.parametrize("name", ["fcfs", "fcfs:0", "static:x", "best", "first-fit:2"])
def test_a_wrong_placer_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="placer"):
        make_placer(name)


class Chaos:
    """A random history: every invariant is checked after every event, and no action may be lost."""

    def __init__(self, seed: int, placer: str) -> None:
        self.rng, self.w = random.Random(seed), World(placer)
        self.submitted: list[int] = []
        self.ended: dict[int, ActionState] = {}
        self.unclean: list[int] = []
        for _ in range(2):
            self.w.node(cpus=4, mem=200, gpus=1)

    def note(self, made: list[de.Decision]) -> None:
        for action, state in replies(made).items():
            assert action not in self.ended, "an action ended twice"
            self.ended[action] = state

    def step(self) -> None:
        w, rng = self.w, self.rng
        open_sessions = [s for s, e in w.ledger.sessions.items()
                         if e.state not in (SessionState.CLOSING,)]
        leases = list(w.ledger.leases.values())
        match rng.randrange(12):
            case 0 | 1 | 2:
                session = rng.choice(open_sessions) if open_sessions and rng.random() < .6 else 0
                degrees = rng.choice([(1,), (2,), (1, 2, 4), (4,), (0,)])
                if not (w.placer == "static:2" and session and degrees == (4,)):
                    self.submitted.append(w.submit(degrees, session, rng.choice([1, 3]),
                                                   gpus=rng.choice([0, 0, 1])))
            case 3:
                w.session(mem=rng.choice([10, 90]))
            case 4 | 5 | 6 if leases:
                lease = rng.choice(leases)
                if lease.lease not in self.unclean:
                    clean = rng.random() < .7
                    if not clean:
                        self.unclean.append(lease.lease)
                    self.note(w.finish(lease.action, clean=clean))
            case 7 if self.unclean:
                self.note(w.happen(ev.LeaseReleased(w.now, self.unclean.pop())))
            case 8:
                for s, e in list(w.ledger.sessions.items()):
                    if e.state is SessionState.OPENING:
                        self.note(w.happen(ev.SessionReady(w.now, s)))
            case 9 if open_sessions and rng.random() < .4:
                self.note(w.happen(ev.SessionClosing(w.now, rng.choice(open_sessions), "")))
            case 10 if rng.random() < .1:
                up = w.ledger.up_nodes()
                self.note(w.happen(ev.NodeLost(w.now, up[0].node, "chaos")))
                self.unclean = [x for x in self.unclean if x in w.ledger.leases]
                w.node(cpus=4, mem=200, gpus=1)
            case 11 if self.submitted and rng.random() < .3:
                action = rng.choice(self.submitted)
                self.note(w.happen(ev.ActionCancelled(w.now, action, "chaos")))
        self.note(w.plan())

    def drain(self) -> None:
        w = self.w
        for _ in range(10_000):
            for s, e in list(w.ledger.sessions.items()):
                if e.state is SessionState.OPENING:
                    w.happen(ev.SessionReady(w.now, s))
                elif e.state is SessionState.CLOSING or (not e.waiting and e.state is (
                        SessionState.IDLE)):
                    self.note(w.happen(ev.SessionClosed(w.now, s, "")))
            for lease in list(w.ledger.leases.values()):
                if lease.lease in self.unclean:
                    self.unclean.remove(lease.lease)
                    w.happen(ev.LeaseReleased(w.now, lease.lease))
                else:
                    self.note(w.finish(lease.action))
            self.note(w.plan())
            if len(self.ended) == len(self.submitted) and not w.ledger.sessions:
                return
        raise AssertionError("it never drained")


@pytest.mark.parametrize("placer", ["first-fit", "fcfs:2", "fcfs:4", "static:2", "paper",
                                    "elastic"])
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_violate_no_invariant_and_lose_no_action(seed: int, placer: str) -> None:
    chaos = Chaos(seed, placer)
    for _ in range(400):
        chaos.step()
    chaos.drain()
    assert set(chaos.ended) == set(chaos.submitted)
    w = chaos.w
    assert all(n.cores.free == 4 for n in w.ledger.up_nodes())
    # the journal alone gives the same ledger, without planning
    again = Scheduler(make_placer("fcfs:1"))
    for event in w.events:
        again.handle(event)
    assert again.ledger.actions == w.ledger.actions
    assert list(again.ledger.nodes) == list(w.ledger.nodes)
    assert {a: e.state for a, e in again.ledger.actions.items() if e.state in ENDED} == chaos.ended
    # and the same seed the same history
    twin = Chaos(seed, placer)
    for _ in range(400):
        twin.step()
    twin.drain()
    assert twin.w.events == w.events
