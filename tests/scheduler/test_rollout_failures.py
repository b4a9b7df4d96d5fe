"""Turns of a rollout pool whose node, service, client or broker fails: they are routed again,
counted once, and answered once."""

from __future__ import annotations

from collections import Counter

from helpers.builders import replies
from helpers.rollout_rig import POOL, Site, site

from tangram_hpc.broker.queries.rollouts_view import rollouts
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import FALTERED, ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.policy.declarations import declaration_of_rollouts
from tangram_hpc.scheduler.policy.lease_reports import finished


def test_turns_of_a_service_on_a_lost_node_are_routed_again() -> None:
    world = site()
    second = world.node(gpus=1)
    turns = [world.turn(n) for n in range(6)]
    world.plan()
    assert {world.service(t) for t in turns} == {"s0", "s1", "big"}
    world.happen(ev.NodeLost(world.now, 1, "gone"))  # s0 and s1 stood there, and nowhere else may
    world.plan()
    assert [world.pool.load(s) for s in ("s0", "s1", "big")] == [-1, -1, 2]
    ended = Counter(replies(world.decisions).values())
    for _ in range(12):
        for lease in list(world.ledger.leases):
            world.happen(ev.LeaseFinished(world.now, lease, Outcome(ActionState.COMPLETED), True))
        world.plan()
    assert Counter(replies(world.decisions).values()) - ended == {ActionState.COMPLETED: 6}
    assert world.ledger.nodes[second].state.value == "UP" and world.pool.open_turns == {}


def test_a_turn_whose_service_goes_while_the_broker_waits_for_its_client_is_routed_again() -> None:
    """The broker is started again and has no payload of a turn that was routed and waits. Then the
    node of its service does not come back.
    """
    world = Site()
    world.gpu_node(1)
    world.declare()
    turns = [world.turn(n) for n in range(2)]
    world.plan()
    waiting = next(t for t in turns if not world.lease_of(t))
    assert world.service(waiting) in ("s0", "s1")
    world.happen(ev.BrokerStarted(world.now, "j", "first-fit", "none", await_until=world.now + 9))
    world.happen(ev.NodeLost(world.now, 1, "its worker did not come back"))
    world.gpu_node(1)
    world.happen(ev.ClientJoined(world.now, 1, "uid-1", "test", 0, 1, "socket"))
    for turn in turns:
        world.happen(ev.ActionResubmitted(world.now, turn))
    world.plan()
    assert world.service(waiting) == "big" and world.lease_of(waiting)
    world.drain()
    assert world.pool.open_turns == {} and len(replies(world.decisions)) == 2


def test_a_turn_that_a_drained_node_returns_is_routed_elsewhere() -> None:
    world = Site()
    world.gpu_node(2)
    world.declare()
    turns = [world.turn(n) for n in range(2)]
    other = world.turn(2)
    world.plan()
    behind = [lease for lease, x in world.ledger.leases.items() if not x.begun]
    assert [world.service(t) for t in (*turns, other)] == ["s0", "s1", "s0"] and len(behind) == 1
    world.happen(ev.NodeDraining(world.now, 1, "drained"))
    world.gpu_node(1)
    world.happen(ev.LeaseReturned(world.now, behind[0]))
    world.plan()
    assert world.service(other) == "big" and world.ledger.actions[other].lease
    for action in (*turns, other):
        world.finish(action)
    assert world.pool.open_turns == {} and world.pool.load("big") == 0


def test_a_turn_that_is_routed_again_is_counted_once() -> None:
    world = site()
    world.serve(world.turn("t"))
    turn = world.turn("t", generated=50, context=200)
    world.plan()
    assert world.service(turn) == "s0"
    fails = Outcome(ActionState.FAILED, reason="its copies die on their way", pushed=FALTERED)
    for fact in finished(world.ledger, ev.LeaseFinished(world.now, world.lease_of(turn), fails,
                                                        True)):
        world.happen(fact)
    assert world.serve(turn) == "s1"
    counts = world.pool.counts
    assert (counts.turns, counts.again, counts.moved) == (2, 1, 0)
    assert (counts.context, counts.moved_context) == (200, 0)
    world.serve(world.turn("t", generated=90, context=300))
    world.end("t", 100)
    assert (counts.turns, counts.judged, counts.right) == (3, 3, 3)


def test_a_failing_service_whose_turn_goes_elsewhere_keeps_no_gpus() -> None:
    world = site()
    turn = world.turn("t", attempts=2)
    world.plan()
    name, number = world.service(turn), world.lease_of(turn)
    lease = world.ledger.leases[number]
    gpus = world.ledger.place(lease.node).gpus
    assert gpus.holds(name, lease.gpus)
    fails = Outcome(ActionState.OUT_OF_MEMORY, reason="it does not fit", pushed=FALTERED)
    for fact in finished(world.ledger, ev.LeaseFinished(world.now, number, fails, True)):
        world.happen(fact)
    assert gpus.residents(lease.gpus) == []
    world.plan()
    assert world.service(turn) != name and world.serve(turn)


def test_a_failing_service_gets_no_turns_for_a_while() -> None:
    world = site()
    turns = [world.turn(n, attempts=2) for n in range(6)]
    world.plan()
    bad = [t for t in turns if world.service(t) == "s0"]
    assert len(bad) == 2
    fails = Outcome(ActionState.FAILED, reason="its copies die on their way", pushed=FALTERED)
    for action in bad:
        end = ev.LeaseFinished(world.now, world.lease_of(action), fails, True)
        for fact in finished(world.ledger, end):
            world.happen(fact)
    assert world.pool.load("s0") == -1 and rollouts(world.scheduler, "job", world.now)[
        "rollouts"][0]["services"][0]["closed_s"] == 10
    for action in [t for t in turns if t not in bad]:
        world.finish(action)
    world.plan()
    assert {world.service(t) for t in bad} <= {"s1", "big"}  # asked for again, by themselves
    last = bad[0]
    for fact in finished(world.ledger, ev.LeaseFinished(world.now, world.lease_of(last), fails,
                                                        True)):
        world.happen(fact)
    assert world.ledger.actions[last].state is ActionState.FAILED  # its attempts are used up
    due = world.scheduler.next_deadline()
    assert due >= 10 * 10**9
    world.now = due
    world.plan()
    assert world.pool.load("s0") == 0 and world.pool.pause_ns("s0") == 20 * 10**9
    assert world.serve(world.turn("later")) == "s0" and world.pool.pause_ns("s0") == 10 * 10**9


def test_a_failing_service_is_also_avoided_by_turns_without_retries() -> None:
    world = site()
    fails = Outcome(ActionState.FAILED, reason="its copies die on their way", pushed=FALTERED)
    first = world.turn(0, attempts=1)
    world.plan()
    assert world.service(first) == "s0"
    for fact in finished(world.ledger, ev.LeaseFinished(world.now, world.lease_of(first), fails,
                                                        True)):
        world.happen(fact)
    assert world.ledger.actions[first].state is ActionState.FAILED
    assert world.serve(world.turn(1, attempts=1)) == "s1"  # and not the one that is free, and fails
    world.pool.check()


def test_a_failing_service_gets_turns_when_no_other_service_is_left() -> None:
    world = Site()
    for name in ("n1", "n2"):
        world.node(gpus=1)
        world.happen(ev.ServiceDeclared(0, ServiceSpec(name, node=name)))
    facts, why = declaration_of_rollouts(world.ledger, rollouts_spec("p", {
        "buckets": [{"services": ["n1", "n2"]}]}), 0)
    assert why == ""
    world.happen(facts[0])
    fails = Outcome(ActionState.FAILED, reason="its copies die on their way", pushed=FALTERED)

    def falters(action: int) -> None:
        world.plan()
        end = ev.LeaseFinished(world.now, world.lease_of(action), fails, True)
        for fact in finished(world.ledger, end):
            world.happen(fact)
    falters(world.turn(0, attempts=1))
    assert world.pool.closed("n1") and world.serve(world.turn(1)) == "n2"
    world.happen(ev.NodeLost(world.now, 2, "gone"))
    world.plan()
    assert world.pool.closed("n1"), "no turn waits for it, so it stays closed"
    last = world.turn(2)
    world.plan()
    assert world.service(last) == "n1" and not world.pool.closed("n1")
    falters(last)  # and it is told so, without a wait
    assert world.ledger.actions[last].state is ActionState.FAILED


def test_the_result_of_a_named_turn_names_its_service_after_its_client_left() -> None:
    world = site()
    turn = world.turn("t", once="work")  # who submits it again gets this result
    world.plan()
    world.happen(ev.ClientLeft(world.now, 1, True, world.now))
    world.plan()
    world.finish(turn)
    told = [d for d in world.decisions if isinstance(d, de.ReplyToClient) and d.action == turn]
    assert [reply.route.service for reply in told] == ["s0"] and turn not in world.ledger.actions


def test_named_turns_continue_when_a_restarted_broker_redeclares_their_pool() -> None:
    world, start = Site(), ev.BrokerStarted(1, "job", "first-fit", "none")
    world.happen(start)
    world.node(gpus=4)
    world.declare()
    named = [world.turn("a", once="a"), world.turn("a", once="b"), world.turn("c", once="c")]
    lost = world.turn("d")
    world.plan()
    world.happen(start)
    other = rollouts_spec("p", {**POOL, "buckets": POOL["buckets"][1:]})  # only `big` is left
    facts, why = declaration_of_rollouts(world.ledger, other, world.now, changed=True)
    assert why == "" and len(facts) == 1
    world.happen(facts[0])
    world.node(gpus=4)
    world.plan()
    assert [world.service(t) for t in named] == ["big", "", "big"]
    for action in named:
        world.plan()
        world.finish(action)
    assert replies(world.decisions) == dict.fromkeys(named, ActionState.COMPLETED) | {
        lost: ActionState.NODE_FAIL}
    assert world.pool.open_turns == {} and world.pool.load("big") == 0


def test_a_turn_that_runs_goes_on_when_its_pool_is_declared_anew() -> None:
    """The broker was started again with another config file, and its workers are still there."""
    world = site()
    runs, fails = world.turn("t"), world.turn("u", attempts=2)
    world.plan()
    later = world.turn("t", generated=50)
    names = ("s1", "big")  # without s0, where the turn `t` runs
    services = tuple(s for s in world.pool.spec.services if s.name in names)
    world.happen(ev.RolloutsDeclared(world.now, world.pool.spec.with_services(services)))
    assert {world.service(runs), world.service(fails)} == {"s0", "s1"}
    world.plan()
    assert not world.lease_of(later), "it waits for the turn before it"
    refused = Outcome(ActionState.FAILED, reason="its copies die on their way", pushed=FALTERED)
    for turn in (runs, fails):
        end = ev.LeaseFinished(world.now, world.lease_of(turn), refused, True)
        for fact in finished(world.ledger, end):
            world.happen(fact)
    world.plan()
    world.drain()
    assert world.pool.open_turns == {}
    assert {world.service(t) for t in (runs, fails, later)} <= {"s1", "big"}


def test_two_trajectories_of_one_name_stay_apart_when_their_pool_is_declared_anew() -> None:
    """The first trajectory has ended while its turn runs; its name then began another one."""
    world = site()
    former = world.turn("t")
    world.plan()
    world.end("t", -1)
    later = world.turn("t", attempts=2)
    world.plan()
    assert world.lease_of(former) and world.lease_of(later)
    names = (world.service(former), "big")
    services = tuple(s for s in world.pool.spec.services if s.name in names)
    world.happen(ev.RolloutsDeclared(world.now, world.pool.spec.with_services(services)))
    refused = Outcome(ActionState.FAILED, reason="its copies die on their way", pushed=FALTERED)
    end = ev.LeaseFinished(world.now, world.lease_of(later), refused, True)
    for fact in finished(world.ledger, end):
        world.happen(fact)
    world.plan()
    assert world.service(later) in names
    world.drain()
    assert world.pool.open_turns == {}
    assert set(replies(world.decisions).values()) == {ActionState.COMPLETED}
