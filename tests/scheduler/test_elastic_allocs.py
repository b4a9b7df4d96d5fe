"""Allocations that grow and shrink: the invariants of `scheduler/autoscale/elastic_allocs.py`, on
examples by hand and on any history.

Time is handed in. What is asserted of a decision is read from the events, never from a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from helpers.builders import World
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import Turn
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState, AllocState, NodeState, SessionState
from tangram_hpc.scheduler.autoscale.alloc_demand import QueueLoad, loads
from tangram_hpc.scheduler.autoscale.backoff import refused
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.declarations import declaration_of_rollouts
from tangram_hpc.scheduler.scheduler import Scheduler

S = 10**9
CPU8 = SatelliteShape("cpu8", "cpu", cpus=8, mem_mib=1000, time_ns=600 * S)
SPOT = SatelliteShape("spot", "scav", cpus=8, mem_mib=1000, time_ns=600 * S)
POLICY = AllocPolicy(
    max_nodes=4, max_core_ns=100_000 * S, target_ns=20 * S, grow_after_ns=5 * S,
    arrive_ns=10 * S, idle_ns=30 * S, patience_ns=60 * S, join_ns=40 * S, backoff_ns=30 * S,
    backoff_max_ns=200 * S, shapes=(CPU8,))


@dataclass
class Elastic(World):
    """A scheduler with a policy, and a Slurm that does what the test says."""

    placer: str = "elastic"
    policy: AllocPolicy = POLICY
    asked: list[int] = field(default_factory=list)  # not yet answered
    ended: list[int] = field(default_factory=list)  # told to end
    jobs: int = 100
    tried: bool = True  # Slurm has taken one of each shape before

    def __post_init__(self) -> None:
        super().__post_init__()
        self.happen(ev.BrokerStarted(0, "7", self.placer, "none"))
        self.happen(ev.AllocationsAllowed(0, self.policy))
        self.join("7")
        if self.tried:
            self.ledger.allocs.taken.update(dict.fromkeys(s.name for s in self.policy.shapes))

    def join(self, allocation: str, cpus: int = 4, mem: int = 1000, gpus: int = 0,
             component: str = "") -> int:
        number = self.ledger.next_node
        self.happen(ev.NodeJoined(self.now, number, NodeSpec(
            f"n{number}", "h", tuple(range(cpus)), mem, tuple(range(gpus)), component,
            backends=("model",), untrusted=("model",), allocation=allocation)))
        if not self.ledger.complete:
            self.happen(ev.NodesComplete(self.now, 1))
        return number

    def to(self, seconds: float) -> list[ev.Event]:
        """Plans once a second until `seconds`; returns the allocation events."""
        before, until = len(self.events), round(seconds * S)
        while self.now < until:
            self.now = min(self.now + S, until)
            for made in self.plan():
                if isinstance(made, de.AskAllocation):
                    self.asked.append(made.alloc)
                elif isinstance(made, de.EndAllocation):
                    self.ended.append(made.alloc)
        return [e for e in self.events[before:] if isinstance(e, KINDS)]

    def plan(self) -> list[de.Decision]:
        made: list[de.Decision] = []
        while events := self.scheduler.plan(self.now):
            for event in events:
                self.proof(event)
                made += self.happen(event)
        return made

    def proof(self, event: ev.Event) -> None:
        """Checks what must hold when a decision is made, on any history."""
        ledger, allocs = self.ledger, self.ledger.allocs
        match event:
            case ev.AllocationAsked(shape=shape):
                assert allocs.nodes_live() + shape.nodes <= self.policy.max_nodes
                assert allocs.core_ns() + shape.core_ns <= self.policy.max_core_ns
                assert not allocs.left_alone(shape, self.now)
                assert event.reason
            case ev.NodeDraining(node=number):
                node = ledger.nodes[number]
                assert not node.sessions
                entry = allocs.entries[allocs.by_job[node.spec.allocation]]
                assert not entry.own
                left = [n for n in ledger.up_nodes() if n.node not in entry.nodes]
                assert len(left) >= self.policy.min_nodes >= 1
            case ev.AllocationReleased(alloc=number):
                assert event.reason
                for node_id in allocs.entries[number].nodes:
                    assert ledger.nodes[node_id].state is NodeState.DRAINED

    def taken(self, alloc: int) -> str:
        """Slurm accepts a request."""
        self.asked.remove(alloc)
        self.jobs += 1
        self.happen(ev.AllocationQueued(self.now, alloc, str(self.jobs)))
        return str(self.jobs)

    def comes(self, alloc: int) -> int:
        """The worker of a satellite joins."""
        shape = self.ledger.allocs.entries[alloc].shape
        return self.join(self.taken(alloc), shape.cpus, shape.mem_mib)

    def gone(self, alloc: int) -> None:
        """A satellite that was told to end has ended."""
        for node in list(self.ledger.allocs.entries[alloc].nodes):
            self.happen(ev.NodeLost(self.now, node, "given back"))
        self.happen(ev.AllocationEnded(self.now, alloc, ""))

    def burst(self, count: int, seconds: int = 10) -> list[int]:
        return [self.submit(1, profile=Profile(seconds * S)) for _ in range(count)]

    def finish_all(self) -> None:
        while self.ledger.leases or len(self.ledger.ready):
            for lease in list(self.ledger.leases):
                self.happen(ev.LeaseFinished(self.now, lease, Outcome(ActionState.COMPLETED), True))
            self.plan()


KINDS = (ev.AllocationAsked, ev.AllocationReleased, ev.AllocationRefused, ev.NodeDraining)


def requested(events: list[ev.Event]) -> list[str]:
    return [e.shape.name for e in events if isinstance(e, ev.AllocationAsked)]


def test_a_burst_requests_the_satellites_it_needs_once() -> None:
    w = Elastic()
    w.burst(100)  # 1000 s of work on 4 CPUs
    assert w.to(4) == []  # not yet for long enough
    made = w.to(20)
    # (1000 - 4 * 10) / 20 - 4 = 44 CPUs are missing: 6 nodes, 4 are allowed
    assert requested(made) == ["cpu8"] * 4
    assert "100 actions wait" not in made[0].reason  # 4 run
    assert "96 actions wait" in made[0].reason and "4 CPUs held" in made[0].reason
    assert w.to(60) == []  # covered, and the bounds are reached


def test_a_queue_that_drains_in_time_requests_no_satellite() -> None:
    w = Elastic()
    w.burst(8)  # 80 s of work on 4 CPUs, 20 s are aimed at, and a node takes 10 s
    assert w.to(60) == []
    assert w.scheduler.state.elastic.verdict == "the units that are held and on their way suffice"


def test_a_small_shortage_requests_one_satellite() -> None:
    w = Elastic()
    w.burst(16)  # 160 s on 4 CPUs: 120 s are left when a node comes, 2 CPUs are missing
    assert requested(w.to(30)) == ["cpu8"]


def test_actions_of_placed_sessions_request_no_satellite() -> None:
    """Actions of a session with a home node cannot start on another node."""
    w = Elastic()
    session = w.session(10, parallel=True)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    for _ in range(100):
        w.submit(1, session=session, profile=Profile(10 * S))
    assert w.to(60) == []


GPU1 = SatelliteShape("gpu1", "gpu", cpus=2, mem_mib=1000, gpus=1, time_ns=600 * S)


class Rollouts(Elastic):
    """One GPU, and a rollout pool of one service with limits on running and queued turns."""

    def __init__(self, node: str = "", running: int = 1, queue: int = 1) -> None:
        super().__init__(policy=msgspec.structs.replace(POLICY, shapes=(GPU1,)))
        self.join("7", gpus=1)
        self.happen(ev.ServiceDeclared(0, ServiceSpec("s", node=node)))
        self.happen(ev.ServiceDeclared(0, ServiceSpec("alone", node=node)))
        facts, why = declaration_of_rollouts(self.ledger, rollouts_spec("p", {"buckets": [
            {"services": "s", "running_max": running, "queue_max": queue}]}), 0)
        assert why == ""
        self.happen(facts[0])
        for _ in range(3):  # so that it is known what a turn takes
            self.turns(1)
            self.plan()
            self.now += 4 * S
            self.finish_all()

    def turns(self, count: int) -> None:
        for _ in range(count):
            number = self.id()
            turn = Turn("p", f"t{number}", 1, 10, 0)
            self.happen(ev.ActionSubmitted(self.now, Action(
                number, "p.sample", Kind.CALL, (1,), "rollouts:p", turn=turn)))

    def gpus(self) -> QueueLoad:
        return loads(self.ledger, self.now)["gpu", ""]


def test_turns_queued_in_a_rollout_pool_request_satellites() -> None:
    w = Rollouts()
    w.turns(20)  # 2 are dealt: some 6 s of work, and some 60 s in the line
    made = w.to(w.now / S + 20)
    assert w.ledger.rollouts["p"].router.waiting == 18
    assert requested(made) == ["gpu1"] and "18 more cannot start on new nodes" in made[0].reason
    assert (w.gpus().waiting, w.gpus().bound) == (1, 18)  # as a second copy has one to run


def test_turns_whose_service_has_no_undrained_node_request_satellites() -> None:
    w = Rollouts(running=4, queue=4)
    w.happen(ev.NodeDraining(w.now, 2, "its end is near"))
    w.turns(20)
    assert requested(w.to(w.now / S + 20)) == ["gpu1"] * 4  # all that is allowed
    assert (w.gpus().waiting, w.gpus().bound, w.gpus().units) == (8, 12, 8)


@pytest.mark.parametrize("turns", [True, False])
def test_calls_of_a_service_bound_to_its_node_request_no_satellite(turns: bool) -> None:
    w = Rollouts(node="n2")
    if turns:
        w.turns(60)
    for _ in range(0 if turns else 60):
        w.submit(1, key="service:alone", profile=Profile(10 * S))
    assert requested(w.to(w.now / S + 60)) == []
    load = w.gpus()
    assert load.work_ns > 60 * S and load.bound == 59 and not load.waiting


def test_a_full_pool_without_a_queue_requests_no_satellite() -> None:
    w = Rollouts(queue=0)
    w.turns(60)
    assert requested(w.to(w.now / S + 60)) == [] and w.gpus().bound == 59


def test_sessions_that_wait_for_memory_request_satellites() -> None:
    w = Elastic()
    for _ in range(5):
        w.session(500)
    made = w.to(60)
    assert requested(made) == ["cpu8", "cpu8"]  # 2 of 5 sessions fit; 1500 MiB wait, 1000 a node
    assert "sessions wait for 1500 MiB" in made[0].reason


def test_work_is_counted_although_a_session_waits_for_memory() -> None:
    """A new session lacks memory and the queue lacks CPUs; each shortage is measured by itself."""
    w = Elastic()
    w.session(900)
    w.plan()
    w.session(900)
    w.burst(100)
    made = w.to(8)
    assert requested(made) == ["cpu8"] * 4 and "actions wait" in made[0].reason


def test_idle_satellites_are_released_and_busy_ones_kept() -> None:
    w = Elastic()
    w.burst(100)
    w.to(8)
    nodes = [w.comes(a) for a in list(w.asked)]
    w.to(9)
    w.finish_all()
    session = w.session(900)
    w.plan()
    home = w.ledger.sessions[session].node
    made = w.to(120)
    assert len([e for e in made if isinstance(e, ev.AllocationReleased)]) == 4 - (home in nodes)
    assert w.ledger.nodes[1].state is NodeState.UP  # the broker's own, idle as well
    told = [e.reason for e in made if isinstance(e, ev.AllocationReleased)]
    assert all(" 30 s" in why for why in told), told
    assert any("idle for 3" in why and "limit 30 s" in why for why in told), told


def test_min_nodes_are_kept_although_idle() -> None:
    policy = AllocPolicy(idle_ns=30 * S, components=True, min_nodes=2)
    w = Elastic(policy=policy)
    w.join("7+1")
    w.join("7+2")
    w.to(200)
    assert len(w.ended) == 1 and len(w.ledger.up_nodes()) == 2


def test_a_component_that_a_service_needs_stays() -> None:
    w = Elastic(policy=AllocPolicy(idle_ns=30 * S, components=True))
    w.join("7+1", gpus=4)
    w.join("7+2")
    w.happen(ev.ServiceDeclared(w.now, ServiceSpec("judge", S)))
    w.to(200)
    gone = [n.spec.allocation for n in w.ledger.nodes.values() if n.state is NodeState.DRAINED]
    assert gone == ["7+2"]


def test_components_are_kept_unless_the_user_allows_their_release() -> None:
    w = Elastic()
    w.join("7+1")
    assert w.to(200) == []


def test_a_rejected_request_names_the_reason_and_backs_off() -> None:
    w = Elastic()
    w.burst(100)
    w.to(8)
    at = []
    for _ in range(4):
        assert w.asked
        at.append(w.now // S)
        for alloc in list(w.asked):
            w.asked.remove(alloc)
            for fact in refused(w.ledger, alloc, "invalid partition specified: cpu", w.now):
                w.happen(fact)
        assert not w.ledger.allocs.satellites()
        before = w.now
        while not w.asked and w.now < before + 300 * S:
            w.to(w.now // S + 1)
            told = w.scheduler.state.elastic.verdict
            assert w.asked or "invalid partition" in told or "it has been so" in told
    gaps = [b - a for a, b in pairwise(at)]
    assert 30 <= gaps[0] < 40 and 60 <= gaps[1] < 70 and 120 <= gaps[2] < 130, gaps


def test_the_next_shape_is_requested_when_slurm_refuses_one() -> None:
    w = Elastic(policy=policy_with(shapes=(SPOT, CPU8)))
    w.burst(16)
    assert requested(w.to(10)) == ["spot"]
    w.asked.clear()
    w.happen(ev.AllocationRefused(w.now, 2, "no such QOS", w.now + 100 * S))
    assert requested(w.to(30)) == ["cpu8"]


def test_a_request_that_waits_is_withdrawn_for_another_shape() -> None:
    w = Elastic(policy=policy_with(shapes=(SPOT, CPU8)))
    w.burst(16)
    w.to(8)
    (alloc,) = w.asked
    w.taken(alloc)
    made = w.to(100)
    assert [type(e) for e in made] == [ev.AllocationReleased, ev.AllocationAsked]
    assert requested(made) == ["cpu8"]
    assert "s for its nodes;" in made[0].reason, "they may boot, and not be in Slurm's queue"


def test_a_pending_request_without_another_shape_is_kept() -> None:
    w = Elastic()
    w.burst(16)
    w.to(8)
    w.taken(w.asked[0])
    assert w.to(400) == []


def test_a_pending_request_is_withdrawn_when_its_work_is_done() -> None:
    w = Elastic()
    w.burst(16)
    w.to(8)
    (alloc,) = w.asked
    w.taken(alloc)
    w.finish_all()
    made = w.to(30)
    assert [type(e) for e in made] == [ev.AllocationReleased]
    assert w.ended == [alloc]


def test_a_satellite_whose_worker_never_joins_is_released_and_its_shape_backs_off() -> None:
    w = Elastic()
    w.burst(100)
    w.to(8)
    (first, *_) = w.asked
    for alloc in list(w.asked):
        w.taken(alloc)
    w.happen(ev.AllocationHeld(w.now, first, w.now, 8))
    made = w.to(60)
    assert [e.alloc for e in made if isinstance(e, ev.AllocationReleased)] == [first]
    w.happen(ev.AllocationEnded(w.now, first, ""))
    assert requested(w.to(70)) == [] and requested(w.to(120)) == ["cpu8"]


def test_a_worker_that_joins_before_sbatch_returns_is_matched_to_its_request() -> None:
    w = Elastic()
    w.burst(16)
    w.to(8)
    (alloc,) = w.asked
    node = w.join("321", 8)
    w.happen(ev.AllocationQueued(w.now, alloc, "321"))
    entry = w.ledger.allocs.entries[alloc]
    assert entry.state is AllocState.RUNNING and list(entry.nodes) == [node]
    assert len(w.ledger.allocs.entries) == 2  # the broker's own, and this


def test_rounds_of_requests_are_at_least_the_grow_time_apart() -> None:
    w = Elastic(policy=policy_with(asks_max=1))
    w.burst(100)
    at = [e.at for e in w.to(40) if isinstance(e, ev.AllocationAsked)]
    assert len(at) == 4 and all(b - a >= 5 * S for a, b in pairwise(at)), at


def test_no_node_is_released_soon_after_a_request() -> None:
    other = SatelliteShape("other", cpus=8, mem_mib=1000, component="other")
    w = Elastic(policy=policy_with(shapes=(CPU8, other), components=True))
    w.join("9", 8)  # it idles from now on
    w.join("7", 1, component="other")
    w.to(20)
    for _ in range(40):
        w.submit(1, component="other", profile=Profile(10 * S))
    made = w.to(28)
    assert requested(made) == ["other"] * 3
    for alloc in w.asked:
        w.happen(ev.AllocationRefused(w.now, alloc, "no", w.now + 999 * S))
    w.finish_all()
    (drained, _) = w.to(200)
    assert drained.at - made[0].at >= 30 * S


def test_an_untried_shape_is_requested_once_until_slurm_accepts_it() -> None:
    w = Elastic(tried=False)
    w.burst(100)
    assert requested(w.to(60)) == ["cpu8"]
    assert "not answered yet" in w.scheduler.state.elastic.verdict
    w.taken(w.asked[0])
    assert requested(w.to(70)) == ["cpu8"] * 3


def test_light_work_that_moves_between_nodes_keeps_one_satellite() -> None:
    """Each node is used now and then, and all nodes together are used little. The nodes are drained
    one by one, and an action on a drained node ends there."""
    w = Elastic(policy=policy_with(idle_ns=20 * S))
    w.burst(100)
    w.to(8)
    for alloc in list(w.asked):
        w.comes(alloc)
    w.to(9)
    w.finish_all()
    for second in range(10, 260, 2):
        light = w.submit(1, profile=Profile(S))
        w.plan()
        w.to(second)
        if w.lease_of(light):
            w.finish(light)
    told = [e.reason for e in w.events if isinstance(e, ev.NodeDraining)]
    assert len(told) == 4 and any("CPUs were lent at once" in why for why in told), told
    assert all(e.state is AllocState.ENDING for e in w.ledger.allocs.satellites())


def test_core_hours_of_an_ended_satellite_count_what_was_used() -> None:
    w = Elastic(policy=policy_with(max_core_ns=2 * CPU8.core_ns))
    w.burst(100)
    assert requested(w.to(8)) == ["cpu8"] * 2
    for alloc in list(w.asked):
        w.comes(alloc)
        w.happen(ev.AllocationHeld(w.now, alloc, w.now))
    since = w.now
    assert requested(w.to(50)) == []
    assert "core-hours used or promised" in w.scheduler.state.elastic.verdict
    for alloc in list(w.ledger.allocs.entries)[1:]:
        w.gone(alloc)
    assert w.ledger.allocs.ended_core_ns == 2 * 8 * (w.now - since)
    assert requested(w.to(200)) == ["cpu8"]  # what is left is enough for one


def policy_with(**changes) -> AllocPolicy:
    return msgspec.structs.replace(POLICY, **changes)


# ---- any history -----------------------------------------------------------------------------

STEPS = st.lists(st.tuples(
    st.sampled_from(["burst", "finish", "session", "close", "take", "come", "run", "refuse", "gone",
                     "lose", "wait", "long"]), st.integers(0, 1 << 16)), max_size=60)
POLICIES = st.builds(
    policy_with, max_nodes=st.integers(0, 5), min_nodes=st.integers(1, 3),
    max_core_ns=st.integers(0, 5 * CPU8.core_ns), grow_after_ns=st.sampled_from([0, 5 * S]),
    idle_ns=st.sampled_from([0, 3 * S, 30 * S]), components=st.booleans(),
    asks_max=st.integers(1, 4), shapes=st.sampled_from([(CPU8,), (SPOT, CPU8), ()]))


class History(Elastic):
    """Any event that may happen to a broker, in any order."""

    def step(self, what: str, n: int) -> None:
        ledger, entries = self.ledger, self.ledger.allocs.entries
        pick = lambda some: some[n % len(some)] if some else None  # noqa: E731
        if what == "burst":
            self.burst(1 + n % 40, 1 + n % 13)
        elif what == "finish" and ledger.leases:
            self.happen(ev.LeaseFinished(self.now, pick(list(ledger.leases)),
                                         Outcome(ActionState.COMPLETED), True))
        elif what == "session":
            self.session(100 + n % 800)
        elif what == "close" and ledger.sessions:
            one = pick(list(ledger.sessions))
            if ledger.sessions[one].state is not SessionState.CLOSING:
                self.happen(ev.SessionClosing(self.now, one, ""))
            if one in ledger.sessions and not ledger.sessions[one].leases:
                self.happen(ev.SessionClosed(self.now, one, ""))
        elif what == "take" and self.asked:
            self.taken(pick(self.asked))
        elif what == "come" and self.asked:
            self.comes(pick(self.asked))
        elif what == "run" and (one := pick([e for e in ledger.allocs.satellites() if e.job])):
            self.happen(ev.AllocationHeld(self.now, one.alloc, self.now, 8))
        elif what == "refuse" and self.asked:
            one = pick(self.asked)
            self.asked.remove(one)
            for fact in refused(ledger, one, "no", self.now):
                self.happen(fact)
        elif what == "gone" and (one := pick([a for a in self.ended if a in entries])):
            if one in self.asked:
                self.asked.remove(one)
            self.gone(one)
        elif what == "lose" and (one := pick([n for n in ledger.up_nodes() if n.node > 1])):
            self.happen(ev.NodeLost(self.now, one.node, "it failed"))
        self.to(self.now / S + (90 if what == "long" else 1 + n % 7))


@settings(max_examples=120, deadline=None)
@given(POLICIES, STEPS)
def test_the_allocation_invariants_hold_on_any_history(
        policy: AllocPolicy, steps: list[tuple[str, int]]) -> None:
    w = History(policy=policy, tried=False)
    for what, n in steps:
        w.step(what, n)
    decided = [e for e in w.events if isinstance(e, KINDS)]
    _never_flaps(policy, decided)
    again = Scheduler(make_placer("elastic"))
    for event in w.events:
        again.handle(event)
    assert again.ledger.allocs == w.ledger.allocs, "a replay differs"
    twice = History(policy=policy, tried=False)
    for what, n in steps:
        twice.step(what, n)
    assert twice.events == w.events


def _never_flaps(policy: AllocPolicy, decided: list[ev.Event]) -> None:
    """Between a release of what idled and the next request lies `grow_after_ns`, and between a
    request and the next release of what idled `idle_ns`."""
    asked_at = released_at = None
    for event in decided:
        if isinstance(event, ev.AllocationAsked):
            if released_at is not None:
                assert event.at - released_at >= policy.grow_after_ns
            asked_at = event.at
        elif isinstance(event, ev.NodeDraining):
            if asked_at is not None:
                assert event.at - asked_at >= policy.idle_ns
            released_at = event.at


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(1, 30), st.integers(1, 4))
def test_satellites_on_their_way_are_not_requested_again(
        count: int, seconds: int, more: int) -> None:
    """For a burst of any size, one round of requests covers it or reaches the bounds."""
    policy = policy_with(asks_max=99, max_nodes=99, max_core_ns=10**18)
    w = Elastic(policy=policy)
    w.burst(count, seconds)
    first = requested(w.to(8))
    held = 4 + 8 * len(first)
    left = count * seconds - 4 * 10
    waits = max(0, count - 4)
    least = min(waits, waits * seconds // 20)
    assert left - 4 * 8 <= 20 * held or 8 * len(first) >= least, "too few CPUs"
    if first:
        assert left > 20 * (held - 8), "too many CPUs"
    assert requested(w.to(8 + 10 * more)) == []
