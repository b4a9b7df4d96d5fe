"""Rollout pools within the scheduler: on any history of turns, tools, losses and restarts every
turn is served once and the pool's counts stay consistent; tool results decide the bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from helpers.builders import World, replies
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.broker.broker_settings import Settings
from tangram_hpc.broker.message_validation import CHECKS
from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.broker.queries.rollouts_view import rollouts
from tangram_hpc.broker.registration import Registration
from tangram_hpc.cli.views.explain_verb import lines
from tangram_hpc.cli.views.info_verb import pool_lines
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import client_of, show
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import RolloutsSpec, Turn
from tangram_hpc.domain.service import FALTERED, EndpointSpec, ServiceSpec
from tangram_hpc.domain.states import ENDED, ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.simulation.rl_lengths import Source, three_phases
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.forecast import forecast
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import reason, refusal
from tangram_hpc.scheduler.policy.declarations import declaration_of_rollouts
from tangram_hpc.scheduler.policy.lease_reports import finished
from tangram_hpc.scheduler.routing import rollout_pools
from tangram_hpc.scheduler.routing.cmlfq import CausalTree, Cmlfq, ToolSignal, bucket_of
from tangram_hpc.scheduler.routing.rollout_pools import shape_of
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.speed import octaves

POOL = {"buckets": [{"services": ["s0", "s1"], "upto": 1_000, "running_max": 1, "queue_max": 1,
                     "context_max": 8_000},
                    {"services": "big", "running_max": 2, "queue_max": 0, "context_max": 30_000}],
        "least": 2, "idle": 0, "crowded": 1 << 60}
ENDS = [ActionState.COMPLETED, ActionState.FAILED, ActionState.TIMEOUT, ActionState.NODE_FAIL]


class Site(World):
    """A world with three services, each on one node, and a rollout pool over them."""

    def gpu_node(self, gpus: int) -> None:
        """A node with prefetching, so that calls run in batches."""
        number = self.ledger.next_node
        spec = NodeSpec(f"n{number}", "host", (0, 1, 2, 3), 1024, tuple(range(gpus)), ahead=4,
                        backends=("model",), untrusted=("model",))
        self.happen(ev.NodeJoined(self.now, number, spec))
        self.happen(ev.NodesComplete(self.now, number))

    def declare(self, **fields: object) -> None:
        for name, node in (("s0", "n1"), ("s1", "n1"), ("big", "")):
            self.happen(ev.ServiceDeclared(0, ServiceSpec(name, node=node, batch=3)))
        facts, why = declaration_of_rollouts(self.ledger, rollouts_spec("p", {**POOL, **fields}), 0)
        assert why == ""
        for fact in facts:
            self.happen(fact)

    @property
    def pool(self):
        return self.ledger.rollouts["p"]

    def turn(self, trajectory: object, generated: int = 0, context: int = 100,
             attempts: int = 2, once: str = "", prompt: int = 1) -> int:
        turn = Turn("p", str(trajectory), prompt, context, generated)
        action = Action(self.id(), "p.sample", Kind.CALL, (1,), "rollouts:p", turn=turn,
                        attempts_max=attempts, once=once)
        assert refusal(self.ledger, self.scheduler.state.placer, action) == ""
        self.now += 1
        self.happen(ev.ActionSubmitted(self.now, action))
        return action.id

    def tool(self, trajectory: object, name: str, size: int = 10,
             state: ActionState = ActionState.COMPLETED) -> None:
        """A command of a trajectory, from its submission to its end."""
        action = Action(self.id(), name, trajectory=str(trajectory))
        self.happen(ev.ActionSubmitted(self.now, action))
        self.plan()
        outcome = Outcome(state, returned=size)
        self.happen(ev.LeaseFinished(self.now, self.lease_of(action.id), outcome, True))

    def end(self, trajectory: object, tokens: int, epoch: int = -1) -> None:
        self.happen(ev.TrajectoryEnded(self.now, self.client, "p", str(trajectory), tokens, epoch))

    def service(self, action: int) -> str:
        route = self.ledger.actions[action].route
        return route.service if route is not None else ""

    def serve(self, action: int) -> str:
        """Lets a turn run to its end; returns the service on which it ran."""
        self.plan()
        service = self.service(action)
        self.finish(action)
        return service


def site(**fields: object) -> Site:
    made = Site()
    made.node(gpus=4)
    made.declare(**fields)
    return made


def teach(world: Site, told: bool) -> None:
    """Plays trajectories that end soon when their tests pass, and continue for long when they
    fail."""
    for n in range(8):
        name, long = f"old-{n}", n % 2 == 1
        world.serve(world.turn(name))
        if told:
            world.tool(name, "tests", state=ActionState.FAILED if long else ActionState.COMPLETED)
        world.serve(world.turn(name, generated=200))
        world.end(name, 9_000 if long else 300, epoch=n)


@pytest.mark.parametrize("told", [True, False])
def test_a_failing_tool_moves_a_trajectory_to_the_larger_bucket(told: bool) -> None:
    world = site()
    teach(world, told)
    for state, bucket in ((ActionState.FAILED, 1), (ActionState.COMPLETED, 0)):
        name = f"new-{state.value}"
        assert world.serve(world.turn(name)) in ("s0", "s1")
        if told:
            world.tool(name, "tests", state=state)
        went = world.serve(world.turn(name, generated=200))
        assert (went == "big") == (told and bucket == 1)
    told_of = rollouts(world.scheduler, "job", world.now)["rollouts"][0]
    assert told_of["turns"] == 20 and told_of["ended"] == 8 and told_of["judged"] == 16
    assert told_of["waiting"] == 0 and told_of["trajectories"] == 2


def test_a_rollout_pool_decides_and_learns_as_cmlfq_alone_does() -> None:
    """Plays whole trajectories of the generator of `bench/bench_routing.py`."""
    world = site(least=4, payload_edges=(1_000, 12_000), enough=8 * 24)  # 24 end in an epoch
    pool = world.pool
    alone = Cmlfq(CausalTree(shape_of(pool.spec)), pool.spec.edges)
    source, action, right = Source(three_phases(0.06, 8), 3), 0, 0
    for epoch in range(3):
        for prompt in range(8):
            for sample in range(3):
                one = source.trajectory(prompt, 9 * epoch + sample, 0.5)
                name, number, done, bucket = f"{epoch}-{prompt}-{sample}", action, 0, 0
                alone.started(number, prompt)
                for step in (*one.turns, None):
                    action += 1
                    pool.wanted(action, 1, Turn("p", name, prompt, 100, done), action)
                    _, route = pool.next()
                    routed = pool.describe(route)
                    pool.note_routed(action, routed)
                    assert routed.wanted == bucket
                    right += bucket == bucket_of(pool.spec.edges, one.generated - done)
                    pool.over(action, action)
                    if step is not None:
                        done += step.generated
                        signal = alone.tree.shape.signal(step.tool, step.chars, step.status)
                        pool.signal(1, name, signal, action)
                        bucket = alone.returned(number, signal, done)
                alone.ended(number, one.generated, epoch)
                pool.ended(1, name, one.generated, epoch)
    assert pool.queues.tree.plain() == alone.tree.plain() == pool.lesson.plain()
    counts = pool.counts
    assert counts.judged == counts.turns == action and counts.right == right > action // 2
    pool.check()


def test_a_cancelled_tool_or_a_tool_before_the_first_turn_moves_no_trajectory() -> None:
    world = site()
    teach(world, True)
    world.tool("x", "tests", state=ActionState.FAILED)  # nothing was generated yet
    assert world.serve(world.turn("x")) != "big"
    world.tool("x", "tests", state=ActionState.CANCELLED)
    assert world.serve(world.turn("x", generated=200)) != "big"
    world.happen(ev.ToolReturned(world.now, 2, "p", "x", "tests", 10, 1))  # another client's
    assert world.serve(world.turn("x", generated=200)) != "big"
    world.happen(ev.ToolReturned(world.now, 1, "p", "x", "tests", 10, 1))
    assert world.serve(world.turn("x", generated=200)) == "big"


def test_queues_of_services_are_bounded_and_explain_says_why_a_turn_waits() -> None:
    world = site()
    turns = [world.turn(n) for n in range(8)]
    world.plan()
    went = Counter(world.service(t) for t in turns)
    assert went == {"s0": 2, "s1": 2, "big": 2, "": 2}
    entry = world.ledger.actions[turns[-1]]
    assert reason(world.ledger, entry, 0, world.now) == "RolloutsFull"
    told = explain(world.scheduler, world.now, show(turns[-1]))
    assert told["turn"]["ahead"] == 1 and told["reason"] == "RolloutsFull"
    assert ("waits for 1 turns in front of it in the queue of pool p: s0 has 2 of 2 requests, "
            "s1 has 2 of 2 requests, big has 2 of 2 requests") in lines(told)[0]
    more = world.turn(0, generated=50)  # a second turn of a trajectory that has one
    assert explain(world.scheduler, world.now, show(more))["turn"]["why"] == "TrajectoryBusy"
    world.finish(turns[0])
    world.plan()
    assert world.service(turns[6]) == "s0" and world.service(turns[7]) == ""
    assert world.service(more) == "" and "routed to s0" in lines(
        explain(world.scheduler, world.now, show(turns[6])))[0]


def test_tangram_info_shows_pool_rates_with_their_counts() -> None:
    world = site()

    def said() -> list[str]:
        return pool_lines(rollouts(world.scheduler, "job", world.now)["rollouts"][0])
    assert said()[0].endswith("0 routed  right bucket - (no trajectory has ended)  "
                              "moved away from their KV - (no second turn was routed)")
    for generated in (0, 50):
        world.serve(world.turn("t", generated=generated))
    world.end("t", 100)
    first, *services = said()
    assert "right bucket 100.0 % of 2  moved away from their KV 0.0 % (0.0 % of context)" in first
    assert [line.split()[2:] for line in services] == [
        ["up", "to", "1000", "tokens", "left", "s0", "degree", "1", "0/1+1"],
        ["up", "to", "1000", "tokens", "left", "s1", "degree", "1", "0/1+1"],
        ["any", "length", "big", "degree", "1", "0/2+0"]]
    assert len({line.index(" degree") for line in services}) == 1  # a column


def test_a_forecast_of_a_turn_does_not_change_the_pool() -> None:
    world = site()
    old = [world.turn(f"old-{n}") for n in range(6)]
    world.plan()
    for action in old:  # so that it is known how long a call of each service takes
        world.finish(action)
    turns = [world.turn(n) for n in range(7)]
    world.plan()
    before = state_of(world.scheduler)
    found = forecast(world.scheduler, turns[6], world.now)
    assert found.at is not None and found.node == 1
    assert state_of(world.scheduler) == before and world.service(turns[6]) == ""
    world.ledger.check()


def test_an_infeasible_turn_is_refused_in_one_line() -> None:
    world, base = site(), Turn("p", "t", 1, 100, 0)
    for turn, text in ((Turn("q", "t", 1, 1, 0), "pool: no rollout pool 'q' is declared"),
                       (Turn("p", "", 1, 1, 0), "trajectory: '' is not a name"),
                       (Turn("p", "t", 1, 1, -1), "context, generated: none may be negative"),
                       (Turn("p", "t", 1, 30_001, 0), "context: 30001 tokens fit on no service")):
        action = Action(world.id(), "x", Kind.CALL, (1,), "rollouts:p", turn=turn)
        why = refusal(world.ledger, world.scheduler.state.placer, action)
        assert why.startswith(text) and "\n" not in why
    tool = Action(world.id(), "x", Kind.EXEC, (1,), turn=base)
    assert refusal(world.ledger, world.scheduler.state.placer, tool).startswith(
        "turn: must be a call")


def test_turns_whose_services_can_never_be_resident_fail_and_do_not_wait() -> None:
    """Calls of such a service do the same, before and after all nodes have joined."""
    world = Site()
    world.node(gpus=2, complete=False)
    world.happen(ev.ServiceDeclared(0, ServiceSpec("s0", node="n1")))
    world.happen(ev.ServiceDeclared(0, ServiceSpec("big", degrees=(4,))))
    facts, why = declaration_of_rollouts(world.ledger, rollouts_spec("q", {
        "buckets": [{"services": "s0", "upto": 9, "context_max": 500}, {"services": "big"}]}), 0)
    assert why == ""
    world.happen(facts[0])
    call = Action(world.id(), "x", Kind.CALL, (4,), "service:big")
    world.happen(ev.ActionSubmitted(world.now, call))

    def turn(context: int) -> Action:
        return Action(world.id(), "q.sample", Kind.CALL, (1,), "rollouts:q",
                      turn=Turn("q", f"t{context}", 1, context, 0))
    small, large = turn(400), turn(600)
    for action in (small, large):
        assert refusal(world.ledger, world.scheduler.state.placer, action) == ""  # nobody knows yet
        world.happen(ev.ActionSubmitted(world.now, action))
    world.happen(ev.NodesComplete(world.now, 1))
    world.plan()
    assert replies(world.decisions) == dict.fromkeys((large.id, call.id), ActionState.FAILED)
    assert world.service(small.id) == "s0" and world.ledger.rollouts["q"].router.waiting == 0
    said = [d.outcome.reason for d in world.decisions if isinstance(d, de.ReplyToClient)]
    assert said[1] == ("pool: no service of 'q' that takes 600 tokens fits on a node, as none has "
                       "an aligned block for it: big needs 4 GPUs; hold such a node, or serve the "
                       "model on fewer GPUs")
    assert refusal(world.ledger, world.scheduler.state.placer, turn(600)) == said[1]
    world.happen(ev.NodeDraining(world.now, 1, "its end is near"))
    assert refusal(world.ledger, world.scheduler.state.placer, turn(400)) == ""  # not now
    world.happen(ev.NodeLost(world.now, 1, "gone"))
    world.node(gpus=1)
    assert refusal(world.ledger, world.scheduler.state.placer, turn(400)).startswith(
        "pool: no service of 'q' that takes 400 tokens fits on a node, as none has an aligned "
        "block for it: s0 needs 1 GPU of n1, big needs 4 GPUs; ")


def test_a_turn_that_only_a_nonresident_service_takes_shows_ReqNodeNotAvail() -> None:
    world = site()
    world.pool.close("big", world.now, world.now + 10**9)
    world.pool.set_callable("big", False)
    waits = world.turn("t", context=20_000)
    world.plan()
    assert reason(world.ledger, world.ledger.actions[waits], 0, world.now) == "ReqNodeNotAvail"


@pytest.mark.parametrize(("fields", "text"), [
    ({"kind": Kind.GRANT, "key": "endpoint:web"}, "turn: must be a call of a service"),
    ({"component": "gpu"}, "component: a turn runs where the services of its pool are"),
    ({"key": "service:s0"}, "key, degrees: a turn needs the key rollouts:POOL"),
    ({"degrees": ()}, "key, degrees: a turn needs the key rollouts:POOL")])
def test_a_turn_with_fields_that_no_client_sends_is_refused(
        fields: dict[str, object], text: str) -> None:
    world = site()
    world.happen(ev.EndpointDeclared(0, EndpointSpec("web", 1, 0, 10**6)))
    turn = Action(world.id(), "x", Kind.CALL, (1,), "rollouts:p", turn=Turn("p", "t", 1, 100, 0))
    assert refusal(world.ledger, world.scheduler.state.placer, turn) == ""
    wrong = msgspec.structs.replace(turn, **fields)
    assert refusal(world.ledger, world.scheduler.state.placer, wrong).startswith(text)


@pytest.mark.parametrize("name", ["running_max", "context_max", "step_ns", "request_ns",
                                  "prefill_ns", "idle_ns", "nodes_max", "kv_far_ns"])
def test_a_pool_with_numbers_out_of_bounds_is_refused(name: str) -> None:
    """No client of this package sends such a pool; in the journal it would end every start."""
    world, good = site(), rollouts_spec("q", POOL)
    for number in (-1, 1 << 62):
        if name in RolloutsSpec.__struct_fields__:
            wrong = msgspec.structs.replace(good, **{name: number + 1 if number > 0 else number})
        else:
            first = msgspec.structs.replace(good.services[0], **{name: number})
            wrong = good.with_services((first, *good.services[1:]))
        facts, why = declaration_of_rollouts(world.ledger, wrong, 0)
        assert facts == [] and why.startswith(f"rollouts q: {name}: "), why


@pytest.mark.parametrize(("fields", "text"), [
    ({"idle_s": float("inf")}, "rollouts q: idle_s: "),
    ({"kv_base_ms": 1e300}, "rollouts q: kv_base_ms: "),
    ({"nodes_max": 1 << 70}, "rollouts q: nodes_max: "),
    ({"payload_edges": (1, 1 << 70)}, "rollouts q: payload_edges: "),
    ({"tree": "trees"}, "rollouts q: tree: 'trees' must be an absolute path")])
def test_a_pool_setting_too_large_for_the_wire_names_its_field(
        fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInput) as told:
        rollouts_spec("q", {**POOL, **fields})
    assert str(told.value).startswith(text) and "\n" not in str(told.value)


def test_a_wrong_pool_is_refused_and_an_equal_declaration_changes_nothing() -> None:
    world = site()
    same = rollouts_spec("p", POOL)
    assert declaration_of_rollouts(world.ledger, same, 0) == ([], "")
    for fields, text in (
            ({"buckets": [{"services": "nobody"}]}, "services: no service 'nobody' is declared"),
            ({"buckets": [{"services": ["s0", "s0"]}]}, "services: 's0' is named twice"),
            ({"buckets": [{"services": "s0", "upto": 9}, {"services": "s1", "upto": 9},
                          {"services": "big"}]}, "upto: [9, 9] must ascend"),
            ({"buckets": [{"services": "s0", "degree": 2}]}, "degree: service 's0' runs on [1]"),
            ({"payload_edges": (5, 5)}, "payload_edges [5, 5]: must be ascending")):
        facts, why = declaration_of_rollouts(world.ledger, rollouts_spec("q", {**POOL, **fields}),
                                             0)
        assert facts == [] and why.startswith(f"rollouts q: {text}"), why
    other = rollouts_spec("p", {**POOL, "worth": 3})
    assert "declared already" in declaration_of_rollouts(world.ledger, other, 0)[1]


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


def test_explain_tells_of_a_turn_that_was_cancelled_before_routing() -> None:
    world = site()
    turns = [world.turn(n) for n in range(7)]
    world.plan()
    world.happen(ev.ActionCancelled(world.now, turns[6], "by its client"))
    told = explain(world.scheduler, world.now, show(turns[6]))
    assert told["state"] == "CANCELLED" and "has not been routed" in lines(told)[0]


def test_the_result_of_a_named_turn_names_its_service_after_its_client_left() -> None:
    world = site()
    turn = world.turn("t", once="work")  # who submits it again gets this result
    world.plan()
    world.happen(ev.ClientLeft(world.now, 1, True, world.now))
    world.plan()
    world.finish(turn)
    told = [d for d in world.decisions if isinstance(d, de.ReplyToClient) and d.action == turn]
    assert [reply.route.service for reply in told] == ["s0"] and turn not in world.ledger.actions


def test_a_turn_submitted_to_a_full_pool_does_not_rescan_the_queue() -> None:
    world = site()
    for n in range(6):
        world.turn(n)
    world.plan()
    router = world.pool.router
    world.turn("waits")
    assert world.pool.next() is None and router._nothing_fits
    more = world.turn("more")
    assert router._nothing_fits  # the line is not looked through again
    world.happen(ev.ActionCancelled(world.now, more, "by its client"))
    world.finish(next(iter(world.pool.open_turns)))
    world.plan()
    assert router.waiting == 0


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


def test_a_tool_report_with_an_unknown_status_is_refused() -> None:
    world = site(tree="/trees")
    world.serve(world.turn("t"))
    registration = Saves(world).registration
    for status, told in ((99, 0), (-1, 0), (1, 1)):
        before, word = len(world.events), ms.ReportToolReturn("p", "t", "tests", 1, status)
        why = CHECKS[type(word)](word)  # as the driver asks before it hands a word on
        if not why:
            registration.report(1, word)
        assert len(world.events) - before == told and ("status" in why) == (not told)


class Saves:
    """A broker's registration with a pool that saves its trees in `/trees`; timer, clock and folder
    belong to the test."""

    def __init__(self, world: Site) -> None:
        self.now, self.takes_s, self.due_s, self.saved = 0, 0.0, 0.0, list[int]()
        self.registration = Registration(world.scheduler, self, self, lambda: self.now,
                                         world.happen, lambda *message: None)
        self.registration.start(Settings("j", "/store", rollouts=(
            rollouts_spec("p", {**POOL, "tree": "/trees"}),)))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due_s, self.elapse = delay_s, call

    def load(self, _: str) -> tuple[None, None]:
        return None, None

    def trouble(self, _: str) -> str:
        return ""

    def close(self) -> None:
        pass

    def save(self, _: str, tree: CausalTree) -> None:
        self.now += round(self.takes_s * 1e9)
        self.saved.append(tree.root.visits)


def test_learned_trees_are_saved_soon_and_use_a_hundredth_of_the_time() -> None:
    world = site(tree="/trees")
    saves = Saves(world)
    assert 0 < saves.due_s <= 10  # so much a kill may cost
    for n, (takes_s, due_s) in enumerate(((0.01, 10), (0.5, 50), (0, 10))):
        world.serve(world.turn(n))
        world.end(n, 300)
        saves.takes_s = takes_s
        saves.elapse()
        assert saves.due_s == pytest.approx(due_s) and saves.saved[-1] == n + 1
    saves.elapse()
    assert len(saves.saved) == 3  # nothing new


def test_idle_trajectories_and_trajectories_of_lost_clients_are_dropped() -> None:
    world = site(idle_s=1.0)
    world.serve(world.turn("old"))
    world.now += 10**9
    world.serve(world.turn("new"))
    assert world.pool.trajectories == 1 and world.pool.counts.dropped == 1
    open_turn = world.turn("open")
    world.happen(ev.ClientLeft(world.now, 1, True, world.now))
    world.plan()
    assert world.pool.trajectories == 0 and world.ledger.actions.get(open_turn) is None
    world.pool.check()


def test_the_number_of_trajectories_without_an_end_is_bounded(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_pools, "TRAJECTORIES_MAX", 3)
    world = site()
    held = [world.turn(f"held-{n}") for n in range(2)]  # older than all, and never dropped
    world.plan()
    for n in range(6):
        world.serve(world.turn(n))
    assert world.pool.trajectories <= 3 + 2 and world.pool.counts.dropped >= 3
    assert set(held) == set(world.pool.open_turns)
    world.serve(world.turn(5, generated=9))  # the newest is still known
    assert world.pool.counts.again == 1


def test_the_epochs_of_a_new_trainer_continue_those_of_the_loaded_tree() -> None:
    world = site()
    teach(world, True)
    tree = world.pool.queues.tree
    again = site()
    again.pool.adopt_prior(tree.merged(type(tree)(tree.shape)), type(tree)(tree.shape))
    again.serve(again.turn("first"))
    again.tool("first", "tests", state=ActionState.FAILED)
    assert again.serve(again.turn("first", generated=200)) == "big"  # known from the other life
    again.end("first", 9_000, epoch=0)
    assert again.pool.queues.tree.newest == tree.newest + 1 == again.pool.lesson.newest


@pytest.mark.parametrize("steps", [
    list(range(1_763_000_000, 1_763_000_600, 2)),  # a clock
    [100 * (n // 30) for n in range(300)],  # a trainer that counts optimizer steps
    [n % 3 for n in range(300)],  # ranks that are not at the same step
    [*range(60), 1_763_000_000, *range(60, 299)],  # one wrong word
    [*range(150), *range(150)]])  # another trainer, that counts anew
def test_a_pool_keeps_enough_lengths_for_any_numbering_of_steps(steps: list[int]) -> None:
    """The pool keeps as many lengths as its estimates use, and the newest are among them."""
    world = site()
    for n, step in enumerate(steps):
        world.serve(world.turn(n))
        world.end(n, 300 if n < 290 else 9_000, epoch=step)
    for tree in (world.pool.queues.tree, world.pool.lesson):
        assert tree.root.visits >= world.pool.spec.enough
        newest = max(tree.root.by_epoch)
        assert sum(n for cell, (n, _) in tree.root.by_epoch[newest].cells.items()
                   if cell > octaves(1_000)) == 10


def test_old_lengths_are_forgotten_by_steps() -> None:
    world = site(enough=16, epochs=2)
    for n in range(40):
        world.serve(world.turn(n))
        world.end(n, 300, epoch=n // 10)
    tree = world.pool.queues.tree
    assert sorted(tree.root.by_epoch) == [2, 3] and tree.root.visits == 20


# ---- any history -------------------------------------------------------------------------------

OPS = st.lists(st.tuples(st.sampled_from(
    ["turn", "turn", "turn", "finish", "finish", "cancel", "tool", "told", "ended", "lost", "drain",
     "join", "leave", "returned", "falters", "plan", "plan", "restart"]),
    st.integers(0, 5), st.integers(0, 3)), min_size=5, max_size=60)


class History(Site):
    """Plays operations, and counts what started and ended."""

    def start(self) -> None:
        self.asked = list[int]()
        self.happen(ev.BrokerStarted(0, "job", "first-fit", "none"))
        self.join_client()
        self.gpu_node(2)
        self.declare()

    def join_client(self) -> None:
        self.now += 1
        number = self.ledger.next_client
        self.happen(ev.ClientJoined(self.now, number, f"uid-{number}", "test", 0, 1, "socket"))
        self.client = number

    def play(self, op: str, a: int, b: int) -> None:
        begun = [n for n, lease in self.ledger.leases.items() if lease.begun]
        ahead = [n for n, lease in self.ledger.leases.items() if not lease.begun]
        waiting = self.pool.open_turns
        up = [n.node for n in self.ledger.up_nodes()]
        self.now += 1
        if op == "turn":
            once = f"once-{self.counter}" if b == 3 else ""
            self.asked.append(self.turn(a, generated=100 * b, attempts=1 + b % 3, once=once,
                                        context=(100, 5_000, 20_000, 100)[b]))
        elif op == "finish" and begun:
            outcome = Outcome(ENDS[b], returned=1_000 * a)
            self.happen(ev.LeaseFinished(self.now, begun[a % len(begun)], outcome, True))
        elif op == "falters" and begun:
            outcome = Outcome(ActionState.FAILED, pushed=FALTERED)
            end = ev.LeaseFinished(self.now, begun[a % len(begun)], outcome, True)
            for fact in finished(self.ledger, end):
                self.happen(fact)
        elif op == "returned" and ahead:
            self.happen(ev.LeaseReturned(self.now, ahead[-1]))
        elif op == "cancel" and waiting:
            action = list(waiting)[a % len(waiting)]
            self.happen(ev.ActionCancelled(self.now, action, "by its client"))
        elif op == "tool":
            self.happen(ev.ActionSubmitted(self.now, Action(self.id(), f"tool{b}",
                                                            trajectory=str(a))))
        elif op == "told":
            self.happen(ev.ToolReturned(self.now, self.client, "p", str(a), "search", 10, b % 3))
        elif op == "ended":
            self.end(a, 1_000 * b - 1, epoch=self.now)
        elif op == "lost" and up:
            self.happen(ev.NodeLost(self.now, up[a % len(up)], "gone"))
        elif op == "drain" and up:
            self.happen(ev.NodeDraining(self.now, up[a % len(up)], "drained"))
        elif op == "join" and len(up) < 3:
            self.gpu_node(2 + a)
        elif op == "leave" and self.ledger.by_uid:
            self.happen(ev.ClientLeft(self.now, self.client, b == 0, self.now + 5 * b))
            self.join_client()
        elif op == "restart":
            self.happen(ev.BrokerStarted(self.now, "job", "first-fit", "none"))
            self.join_client()
            self.gpu_node(4)
        elif op == "plan":
            self.plan()

    def settle(self) -> None:
        """Ends all that is open, on a node that has every service."""
        for node in self.ledger.up_nodes():
            self.happen(ev.NodeLost(self.now, node.node, "gone"))
        self.ledger.next_node = max(self.ledger.next_node, 1)
        spec = self.ledger.nodes[1].spec
        self.happen(ev.NodeJoined(self.now, self.ledger.next_node, spec))
        self.happen(ev.NodesComplete(self.now, 1))
        for _ in range(400):
            self.plan()
            for lease in [n for n, x in self.ledger.leases.items() if x.begun]:
                self.happen(ev.LeaseFinished(self.now, lease, Outcome(ActionState.COMPLETED),
                                             True))
            self.now = max(self.now, self.scheduler.next_deadline())
            if not self.pool.open_turns and not len(self.ledger.ready):
                return
        raise AssertionError(f"turns that never end: {self.pool.open_turns}")


@settings(max_examples=25, deadline=None)
@given(OPS)
def test_every_turn_is_served_once_and_the_pool_counts_stay_consistent(
        ops: list[tuple[str, int, int]]) -> None:
    check_history(ops)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(OPS)
def test_every_turn_is_served_once_in_many_histories(ops: list[tuple[str, int, int]]) -> None:
    check_history(ops)


def check_history(ops: list[tuple[str, int, int]]) -> None:
    """Plays a history to its end (`SimulationWorld.happen` checks all invariants after each
    event)."""
    world = History()
    world.events.clear()
    world.scheduler = Scheduler(make_placer("first-fit"))
    world.start()
    for op, a, b in ops:
        world.play(op, a, b)
    world.settle()
    told = Counter(d.action for d in world.decisions if isinstance(d, de.ReplyToClient))
    assert all(told[action] == 1 for action in world.asked), "a turn ended twice or never"
    world.pool.router.check()
    assert world.pool.router.waiting == 0 and not any(
        max(0, world.pool.load(s)) for s in ("s0", "s1", "big"))
    starts = [d.action for d in world.decisions if isinstance(d, de.StartLease)]
    assert set(starts) <= {e.action.id for e in world.events if isinstance(e, ev.ActionSubmitted)}
    for wise in (False, True):  # a replay decides nothing, whatever it believes
        replay = Scheduler(make_placer("first-fit"))
        for event in world.events:
            replay.handle(event)
            replay.ledger.check()
            if wise and isinstance(event, ev.RolloutsDeclared):
                pool = replay.ledger.rollouts["p"]
                prior = tree_of_long_trajectories(pool.spec)
                pool.adopt_prior(prior, CausalTree(shape_of(pool.spec)))
        same, there = state_of(replay), state_of(world.scheduler)
        assert same[0] == there[0] and (wise or same[1] == there[1])


def tree_of_long_trajectories(spec: RolloutsSpec) -> CausalTree:
    """A tree that expects long trajectories after any tool result."""
    tree = CausalTree(shape_of(spec))
    for n in range(8):
        tree.learn(1, n, [ToolSignal(f"tool{n % 4}", 0, n % 3)], [0], 20_000)
    return tree


def state_of(scheduler: Scheduler) -> tuple[object, object]:
    """The parts of a state that a replay must restore, estimates included."""
    pool = scheduler.ledger.rollouts["p"]
    actions = {a: (e.state, e.action.key, e.route) for a, e in scheduler.ledger.actions.items()
               if e.state not in ENDED or client_of(a)}
    books = actions, pool.trajectories, [pool.load(s.name) for s in pool.spec.services]
    return books, (pool.counts, pool.queues.tree.plain(), pool.lesson.plain())


class Kept(Saves):
    """As `Saves`, with trees in the folder that were saved by an earlier broker."""

    def __init__(self, world: Site, tree: CausalTree) -> None:
        self._tree = tree
        super().__init__(world)

    def load(self, _: str) -> tuple[CausalTree, CausalTree]:
        return self._tree, self._tree


def test_a_replay_begins_with_the_trees_that_the_broker_loaded() -> None:
    teacher = site()
    teach(teacher, True)
    learned = teacher.pool.queues.tree
    world = site(tree="/trees")
    Kept(world, learned)
    assert world.pool.queues.tree.plain() == world.pool.lesson.plain() == learned.plain()
    world.serve(world.turn("first"))
    world.tool("first", "tests", state=ActionState.FAILED)
    assert world.serve(world.turn("first", generated=200)) == "big"  # only the trees say so
    world.end("first", 9_000)
    replayed = Scheduler(make_placer("elastic"))
    events = msgspec.msgpack.decode(msgspec.msgpack.encode(world.events), type=list[ev.AnyEvent])
    for event in events:
        replayed.handle(event)
    pool = replayed.ledger.rollouts["p"]
    assert pool.queues.tree.plain() == world.pool.queues.tree.plain() != learned.plain()
    assert pool.lesson.plain() == world.pool.lesson.plain()


def test_loading_empty_trees_is_journaled_without_their_bytes() -> None:
    world = site(tree="/trees")
    Saves(world)
    assert world.events[-1] == ev.RolloutPriorLoaded(0, "p", b"", b"")
    assert world.pool.queues.tree.nodes == 1
