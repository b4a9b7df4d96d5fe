"""Ready actions are taken by turns: between clients, then between trajectories of one client."""

from __future__ import annotations

import asyncio
import copy
import socket

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import MICRO, EndpointSpec, ServiceSpec
from tangram_hpc.domain.states import ActionState, SessionState
from tangram_hpc.protocol.frame import Outbox
from tangram_hpc.protocol.message import Ping
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.fair_order import PoolShares
from tangram_hpc.scheduler.state.tenant_use import Tenants
from tangram_hpc.transport.socket.asyncsock import SocketLink

PLACERS = ("elastic", "paper", "first-fit", "fcfs:2", "static:2")
SECOND = 10**9


def two_clients(placer: str, cpus: int = 4, gpus: int = 0) -> World:
    """A world of one node with clients 1 and 2."""
    w = World(placer)
    w.happen(ev.ClientJoined(0, 2, "uid-2", "other", 0, 1, "socket"))
    for name in ("judge", "teacher"):
        w.happen(ev.ServiceDeclared(0, ServiceSpec(name, restore_ns=1000)))
    w.happen(ev.EndpointDeclared(0, EndpointSpec("search", 2, 10**9 * MICRO, 10**9 * MICRO)))
    w.node(cpus=cpus, mem=100_000, gpus=gpus)
    return w


def leases_ended_before(w: World, action: int, most: int) -> int:
    """How many leases end, oldest first, before an action starts; at most `most`."""
    for ended in range(most):
        w.plan()
        if w.ledger.actions[action].state is not ActionState.PENDING:
            return ended
        w.finish(w.ledger.leases[next(iter(w.ledger.leases))].action)
    return most


@pytest.mark.parametrize("placer", PLACERS)
@pytest.mark.parametrize("known", [False, True])
def test_a_flood_of_actions_does_not_delay_another_client(placer: str, known: bool) -> None:
    w = two_clients(placer)
    short, long = (Profile(SECOND), Profile(100 * SECOND)) if known else (None, None)
    for _ in range(200):
        w.submit(1, profile=short)
    w.plan()
    w.client = 2
    assert leases_ended_before(w, w.submit(1, profile=long), 100) <= 5


@pytest.mark.parametrize("placer", PLACERS[:4])
@pytest.mark.parametrize("fields", [
    {"key": "service:judge"}, {"key": "endpoint:search"}, {"mem_mib": 50_000},
    {"gpus": 1}])
def test_clients_share_every_resource_by_turns(placer: str, fields: dict) -> None:
    w = two_clients(placer, gpus=2)
    for _ in range(150):
        w.submit(1, **fields)
    w.plan()
    w.client = 2
    assert leases_ended_before(w, w.submit(1, **fields), 100) <= 5


@pytest.mark.parametrize("placer", PLACERS)
def test_two_floods_are_served_by_turns(placer: str) -> None:
    w = two_clients(placer)
    for client in (1, 2):
        w.client = client
        for _ in range(150):
            w.submit(1)
    order = []
    while len(order) < 100:
        order += started(w.plan())
        w.finish(w.ledger.leases[next(iter(w.ledger.leases))].action)
    assert 45 <= sum(client_of(action) == 2 for action in order[:100]) <= 55


@pytest.mark.parametrize(("how", "placer"), [
    *(("label", placer) for placer in PLACERS),
    *(("session", placer) for placer in PLACERS[:4])])  # static: a session has its own cores
def test_a_trajectory_with_many_actions_does_not_delay_other_trajectories(
        how: str, placer: str) -> None:
    w = two_clients(placer, cpus=8)

    def trajectory(name: str) -> dict[str, object]:
        if how == "label":
            return {"trajectory": name}
        session = w.session(parallel=True)
        w.plan()
        w.happen(ev.SessionReady(w.now, session))
        return {"session": session}

    big, small = trajectory("big"), trajectory("small")
    for _ in range(300):
        w.submit(1, **big)
    w.plan()
    assert leases_ended_before(w, w.submit(1, **small), 200) <= 20


@pytest.mark.parametrize("placer", ["elastic", "first-fit", "fcfs:2"])
def test_single_actions_and_trajectories_of_one_client_are_both_served(placer: str,) -> None:
    w = two_clients(placer)
    for _ in range(300):
        w.submit(1)
    names = [f"t{n}" for n in range(40)]
    of = {w.submit(1, trajectory=name): name for name in names}
    served = {"single": 0, "trajectory": 0}
    for _ in range(200):
        for action in started(w.plan()):
            served["trajectory" if action in of else "single"] += 1
        ended = w.ledger.leases[next(iter(w.ledger.leases))].action
        w.finish(ended)
        if ended in of:  # each trajectory always has its next action at once
            of[w.submit(1, trajectory=of[ended])] = of[ended]
    assert min(served.values()) >= 70, served


def test_trajectories_with_few_actions_each_are_served_in_order_of_arrival() -> None:
    w = two_clients("fcfs:1", cpus=1)
    order = [w.submit(1, trajectory=f"t{n % 5}") for n in range(60)]
    seen: list[int] = []
    while len(seen) < 60:
        seen += started(w.plan())
        w.finish(seen[-1])
    assert seen == order


def test_prefetched_leases_are_shared_between_clients_by_turns() -> None:
    w = World("elastic")
    w.happen(ev.ClientJoined(0, 2, "uid-2", "other", 0, 1, "socket"))
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n", "h", (0,), 64, ahead=64, untrusted=("model",))))
    w.happen(ev.NodesComplete(0, 1))
    for _ in range(500):
        w.submit(1, profile=Profile(1000))
    w.client = 2
    other = w.submit(1, profile=Profile(1000))
    assert other in started(w.plan())[:4]


def two_floods(first: str = "") -> World:
    """A node of one CPU with prefetching, and two clients with 600 short actions each. The actions
    of client 1 belong to trajectory `first`, or to none."""
    w = World("elastic")
    w.happen(ev.ClientJoined(0, 2, "uid-2", "other", 0, 1, "socket"))
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n", "h", (0,), 64, ahead=64, untrusted=("model",))))
    w.happen(ev.NodesComplete(0, 1))
    for _ in range(600):
        for w.client in (1, 2):
            w.submit(1, profile=Profile(1000), trajectory=first if w.client == 1 else "")
    return w


def count_ended(w: World, some: set[int], turns: int, back: int) -> int:
    """How many of `some` are among the next actions that end, one after the other. Every tenth
    time, at most `back` leases of `some` that have not begun are returned."""
    found = 0
    for n in range(turns):
        w.plan()
        if n % 10 == 0:
            ahead = [x.lease for x in w.ledger.leases.values() if not x.begun and x.action in some]
            for lease in ahead[::-1][:back]:
                w.happen(ev.LeaseReturned(w.now, lease))
            w.plan()
        ends = next(x.action for x in w.ledger.leases.values() if x.begun)
        found += ends in some
        w.finish(ends)
    return found


@pytest.mark.parametrize("first", ["", "t"])
def test_a_returned_lease_is_counted_once_between_clients(first: str) -> None:
    w = two_floods(first)
    ones = {a for a in w.ledger.actions if client_of(a) == 1}
    w.client = 2
    assert 195 <= count_ended(w, ones, 400, back=5) <= 205


def test_a_returned_lease_is_counted_once_between_the_groups_of_a_client() -> None:
    w = two_floods()
    for action in [a for a in w.ledger.actions if client_of(a) == 2]:
        w.happen(ev.ActionCancelled(w.now, action, "not wanted"))
    w.client = 1
    ones = {w.submit(1, profile=Profile(1000), trajectory=f"t{n}") for n in range(600)}
    # a group may be BURST turns ahead before the other comes first
    assert 190 <= count_ended(w, ones, 400, back=5) <= 210


def test_a_returned_action_is_counted_anew_if_its_group_was_empty_meanwhile() -> None:
    pool = PoolShares(Tenants(), "cpu")
    one, _ = pool.of(1), pool.of(2)
    counted = one.served(0, 1, 7)
    assert one.tag == 1
    one.returned(7, counted)
    assert one.served(0, 1, 7) == counted and one.tag == 1
    pool.group_emptied(one)
    one, _ = pool.of(1), pool.of(2)
    one.returned(7, counted)
    one.served(0, 1, 7)
    assert one.tag == 1 and pool.time == 0


def test_a_second_attempt_after_a_node_failure_counts_as_another_turn() -> None:
    w = two_clients("fcfs:1", cpus=1)
    for _ in range(3):
        for w.client in (1, 2):
            w.submit(1, attempts=9)
    served = []
    for _ in range(6):
        served += started(w.plan())
        state = ActionState.NODE_FAIL if client_of(served[-1]) == 1 else ActionState.COMPLETED
        w.finish(served[-1], state)
    assert [client_of(action) for action in served] == [1, 2, 1, 2, 1, 2]


def test_a_client_blocked_on_a_gpu_accumulates_no_turns() -> None:
    w = two_clients("first-fit", gpus=1)
    w.client = 2
    w.submit(1, gpus=1)
    w.plan()
    held = w.submit(1, gpus=1)  # waits for the GPU while the other client is served
    w.client = 1
    for _ in range(120):
        w.submit(1)
    for _ in range(60):
        w.plan()
        w.finish(next(x.action for x in w.ledger.leases.values() if client_of(x.action) == 1))
    w.client = 2
    for _ in range(100):
        w.submit(1)
    w.finish(next(x.action for x in w.ledger.leases.values() if client_of(x.action) == 2))
    seen = started(w.plan())
    assert held in seen
    while len(seen) < 40:
        w.finish(next(x.action for x in w.ledger.leases.values()))
        seen += started(w.plan())
    assert sum(client_of(action) == 1 for action in seen) >= 12


@pytest.mark.parametrize("placer", PLACERS)
def test_a_flood_of_sessions_does_not_delay_another_clients_session(placer: str) -> None:
    w = two_clients(placer, cpus=64)
    many = [w.session(mem=10_000) for _ in range(200)]  # ten fit at a time
    w.plan()
    w.client = 2
    one = w.session(mem=10_000)
    for ended in range(100):
        w.plan()
        if w.ledger.sessions[one].state is not SessionState.WAITING:
            break
        w.happen(ev.SessionClosed(w.now, many[ended], ""))
    assert ended <= 2 and [s in w.ledger.sessions for s in many[ended:]] == [True] * (200 - ended)


def test_two_clients_sessions_open_by_turns_and_in_order() -> None:
    w = two_clients("first-fit")
    of: dict[int, list[int]] = {1: [], 2: []}
    for w.client in (1, 2):
        of[w.client] = [w.session(mem=100_000) for _ in range(30)]
    seen: list[int] = []
    while len(seen) < 60:
        w.plan()
        (opened,) = [s for s, e in w.ledger.sessions.items()
                     if e.state is SessionState.OPENING]
        seen.append(opened)
        w.happen(ev.SessionClosed(w.now, opened, ""))
    assert [s for s in seen if client_of(s) == 1] == of[1]
    assert [s for s in seen if client_of(s) == 2] == of[2]
    assert all({client_of(s) for s in pair} == {1, 2} for pair in zip(seen[::2], seen[1::2],
                                                                       strict=True))


def test_a_large_session_waits_for_at_most_one_session_of_each_other_client() -> None:
    w = two_clients("first-fit")
    held = [w.session(mem=10_000) for _ in range(10)]
    w.plan()
    large = w.session(mem=60_000)
    w.client = 2
    small = [w.session(mem=10_000) for _ in range(50)]
    for session in held[:7]:  # six make room for the large one, one for a small one before it
        w.happen(ev.SessionClosed(w.now, session, ""))
        w.plan()
    opened = [s for s in small if w.ledger.sessions[s].state is not SessionState.WAITING]
    assert w.ledger.sessions[large].state is SessionState.OPENING and len(opened) <= 1


def test_a_copied_or_replayed_session_queue_keeps_its_order() -> None:
    w = two_clients("first-fit")
    for n in range(40):
        w.client = 1 + (n % 3 == 0)
        w.session(mem=30_000)
    w.plan()
    again = Scheduler(make_placer("first-fit"))
    for event in w.events:
        again.handle(event)
    waiting = w.ledger.session_queue
    order = list(waiting)
    assert again.ledger.session_queue == waiting == copy.deepcopy(waiting)
    assert list(again.ledger.session_queue) == order and len(order) == 37 == len(waiting)
    assert all(session in waiting for session in order)


def test_a_replayed_scheduler_grants_in_the_same_order() -> None:
    w = two_clients("elastic")
    for n in range(200):
        w.client = 1 + (n % 3 == 0)
        w.submit(1, trajectory=f"t{n % 4}" if n % 2 else "")
    for _ in range(50):
        w.plan()
        w.finish(w.ledger.leases[next(iter(w.ledger.leases))].action)
    again = Scheduler(make_placer("elastic"))
    for event in w.events:
        again.handle(event)
    w.scheduler.state.dirty = again.state.dirty = True
    for x in (w.scheduler, again):
        x.handle(ev.LeaseFinished(w.now, next(iter(x.ledger.leases)),
                                  Outcome(ActionState.COMPLETED), True))

    def order(scheduler: Scheduler) -> list[int]:
        walk, seen = scheduler.ledger.ready.walk("cpu"), []
        while (head := walk.head()) is not None:
            seen.append(head[0])
            walk.next()
        return seen

    assert order(again) == order(w.scheduler) and len(order(again)) > 100


def test_a_link_with_many_messages_does_not_starve_a_quiet_link() -> None:
    async def heard() -> list[str]:
        loop, found = asyncio.get_running_loop(), list[str]()
        pairs = {name: socket.socketpair() for name in ("loud", "quiet")}
        links = []
        for name, count in (("loud", 2000), ("quiet", 1)):
            out = Outbox()
            for n in range(count):
                out.put(Ping(n))
            pairs[name][1].sendall(b"".join(bytes(part) for part in out.take()))
        for name in ("loud", "quiet"):
            link = SocketLink(pairs[name][0], loop)
            link.attach(lambda message, data, name=name: found.append(name), lambda: None,
                        lambda reason: None)
            links.append(link)
        while len(found) < 2001:
            await asyncio.sleep(0)
        for link in links:
            link.close()
        for _, end in pairs.values():
            end.close()
        return found

    assert asyncio.run(heard()).index("quiet") <= 512


def test_messages_read_before_a_peer_was_lost_are_delivered() -> None:
    """A write between two reads finds out that the peer is gone."""
    async def heard() -> list[int]:
        ours, theirs = socket.socketpair()
        link, found = SocketLink(ours, asyncio.get_running_loop()), list[int]()
        lost = asyncio.Event()

        def answer() -> None:
            link.send(Ping(0))
            link.flush()

        link.attach(lambda message, data: found.append(message.stamp), answer,
                    lambda why: lost.set())
        out = Outbox()
        for n in range(1000):
            out.put(Ping(n))
        theirs.sendall(b"".join(bytes(part) for part in out.take()))
        theirs.close()
        await asyncio.wait_for(lost.wait(), 60)
        return found

    assert asyncio.run(heard()) == list(range(1000))
