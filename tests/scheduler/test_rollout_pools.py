"""Rollout pools within the scheduler: tool results decide the bucket, queues are bounded, and wrong
turns and pools are refused in one line."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from helpers.builders import replies
from helpers.rollout_rig import POOL, Saves, Site, site, state_of, teach

from tangram_hpc.broker.message_validation import CHECKS
from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.broker.queries.rollouts_view import rollouts
from tangram_hpc.cli.views.explain_verb import lines
from tangram_hpc.cli.views.info_verb import pool_lines
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.rollouts import RolloutsSpec, Turn
from tangram_hpc.domain.service import EndpointSpec, ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.forecast import forecast
from tangram_hpc.scheduler.policy.admission import reason, refusal
from tangram_hpc.scheduler.policy.declarations import declaration_of_rollouts
from tangram_hpc.scheduler.routing import rollout_pools


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


def test_a_turn_that_no_service_was_chosen_for_rests_on_the_calls_and_not_on_commands() -> None:
    world = site()
    world.submit(1)
    turns = [world.turn(n) for n in range(8)]
    world.plan()
    calls = sum(bool(world.lease_of(turn)) for turn in turns)
    assert calls and world.service(turns[7]) == ""
    assert forecast(world.scheduler, turns[7], world.now).rests_on == {"unknown": calls}
    waits = [world.submit(4) for _ in range(2)][-1]
    assert forecast(world.scheduler, waits, world.now).rests_on == {"unknown": 1}


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


def test_explain_tells_of_a_turn_that_was_cancelled_before_routing() -> None:
    world = site()
    turns = [world.turn(n) for n in range(7)]
    world.plan()
    world.happen(ev.ActionCancelled(world.now, turns[6], "by its client"))
    told = explain(world.scheduler, world.now, show(turns[6]))
    assert told["state"] == "CANCELLED" and "has not been routed" in lines(told)[0]


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
