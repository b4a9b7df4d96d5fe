"""Every placer either refuses a call of a service at once, in one line, or starts it in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.broker_rig import BrokerRig
from helpers.builders import World
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.cli import main
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import RolloutService, RolloutsSpec, Turn
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import refusal
from tangram_hpc.scheduler.scheduler import Scheduler

PLACERS = ("elastic", "paper", "first-fit", "fcfs:1", "fcfs:4", "static", "static:4")
DEGREES = ((1,), (2,), (4,), (8,), (1, 2), (2, 4), (1, 4), (1, 2, 4, 8), (4, 8))
CALL = {"kind": Kind.CALL, "key": "service:judge"}


def judged(placer: str, nodes: list[int], spec: ServiceSpec) -> World:
    """A world with a node for each number of GPUs."""
    w = World(placer)
    w.happen(ev.ServiceDeclared(0, spec))
    for number, gpus in enumerate(nodes, 1):
        w.node(gpus=gpus, complete=number == len(nodes))
    return w


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLACERS), st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=3),
       st.lists(st.sampled_from(DEGREES), min_size=1, max_size=4), st.data())
def test_a_service_call_is_either_refused_at_submission_or_starts(
        placer: str, nodes: list[int], calls: list[tuple[int, ...]], data: st.DataObject) -> None:
    where = data.draw(st.sampled_from([("", ()), ("n1", ()), ("n1", (0, 1)), ("", (2, 3))]))
    bound = ServiceSpec("judge", 10**9, degrees=calls[0], node=where[0], gpus=where[1])
    w = judged(placer, nodes, bound if not placer.startswith("static") else ServiceSpec("judge"))
    begun = []
    for degrees in calls:
        action = Action(w.id(), "x", degrees=degrees, **CALL)
        why = refusal(w.ledger, w.scheduler.state.placer, action)
        assert "\n" not in why
        spec, most = w.ledger.services["judge"], w.scheduler.state.placer.block_max
        able = [n for n in w.ledger.nodes.values() if degrees[0] <= most
                for block, _ in n.gpus.blocks[degrees[0]] if spec.may_stand(n.spec.name, block)]
        assert bool(why) != bool(able), (why, able)
        if not why:
            begun.append(action.id)
            w.happen(ev.ActionSubmitted(w.now, action))
    w.plan()
    for _ in range(20 * len(begun)):  # not `drain`: that would wait for ever
        for lease in list(w.ledger.leases):
            w.happen(ev.LeaseFinished(w.now, lease, Outcome(ActionState.COMPLETED), True))
        w.now = max(w.now + 10**9, w.scheduler.next_deadline())
        w.plan()
    ended = {e.lease for e in w.events if isinstance(e, ev.LeaseFinished)}
    granted = {e.action: e.lease for e in w.events if isinstance(e, ev.LeaseGranted)}
    assert set(granted) == set(begun) and set(granted.values()) == ended


def test_static_cancels_calls_on_several_gpus_once_all_nodes_have_joined() -> None:
    w = World("static")
    w.happen(ev.ServiceDeclared(0, ServiceSpec("judge")))
    w.node(gpus=2, complete=False)
    wide = w.submit((2,), key="service:judge")  # from the journal of another placer
    narrow = w.submit((1, 2), key="service:judge")
    w.plan()
    assert w.ledger.actions[narrow].state is not ActionState.PENDING
    assert w.ledger.actions[wide].state is ActionState.PENDING
    w.happen(ev.NodesComplete(w.now, 1))
    said = [e for e in w.events if isinstance(e, ev.ActionCancelled) and e.action == wide]
    assert "placer static:1 gives each call 1 GPU" in said[0].reason


def test_a_broker_with_static_refuses_wide_services_and_serves_on() -> None:
    rig = BrokerRig("static:1")
    worker, client = rig.worker(gpus=(0, 1)), rig.client()
    client.say(ms.DeclareService(1, ServiceSpec("wide", backend="fake", degrees=(2, 4))))
    assert "runs on 2 GPUs or more" in client.last(ms.Rejected).text
    client.say(ms.DeclareService(2, ServiceSpec("j", backend="fake", degrees=(1, 2))))
    call = Action(mint(1, 9), "x", Kind.CALL, (2,), "service:j")
    client.say(ms.Submit(call), b"call")
    assert client.last(ms.Rejected).id == call.id
    good = Action(mint(1, 10), "x", Kind.CALL, (1, 2), "service:j")
    client.say(ms.Submit(good), b"call")
    assert (worker.last(ms.StartAttempt).action.id == good.id
            and len(worker.last(ms.StartAttempt).gpus) == 1)


def test_static_routes_turns_only_to_services_on_one_gpu() -> None:
    w = World("static")
    for name, degree in (("one", 1), ("two", 2)):
        w.happen(ev.ServiceDeclared(0, ServiceSpec(name, degrees=(degree,))))
    w.node(gpus=4)
    both = (RolloutService("one", 0, 1, 8, 8, 1000, 1, 1, 1),
            RolloutService("two", 0, 2, 8, 8, 1000, 1, 1, 1))
    w.happen(ev.RolloutsDeclared(0, RolloutsSpec("both", (), both[:1])))
    w.happen(ev.RolloutsDeclared(0, RolloutsSpec("wide", (), both[1:])))
    turns = {pool: Action(w.id(), "x", Kind.CALL, (1,), f"rollouts:{pool}",
                          turn=Turn(pool, "t", 0, 0, 0)) for pool in ("both", "wide")}
    why = {pool: refusal(w.ledger, w.scheduler.state.placer, turn) for pool, turn in turns.items()}
    assert why["both"] == "" and "'wide' calls two on 2 GPUs, but placer static:1" in why["wide"]


def test_a_replay_uses_the_block_limit_of_the_placer_that_wrote_the_journal() -> None:
    w = World("elastic")
    block_max = w.scheduler.state.placer.block_max
    w.happen(ev.BrokerStarted(0, "j", "elastic", "none", block_max=block_max))
    w.happen(ev.ServiceDeclared(0, ServiceSpec("two", degrees=(2,))))
    w.happen(ev.RolloutsDeclared(0, RolloutsSpec(
        "wide", (), (RolloutService("two", 0, 2, 8, 8, 1000, 1, 1, 1),))))
    w.node(gpus=4)
    turn = Action(w.id(), "x", Kind.CALL, (1,), "rollouts:wide", turn=Turn("wide", "t", 0, 0, 0))
    w.happen(ev.ActionSubmitted(w.now, turn))
    w.plan()
    assert any(isinstance(e, ev.TurnRouted) for e in w.events)
    twin = Scheduler(make_placer("static:1"))
    for event in w.events:
        twin.handle(event)
    assert sorted(twin.ledger.leases) == sorted(w.ledger.leases) != []


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit", "fcfs:1", "static:1"])
def test_a_call_of_an_unknown_service_is_refused_while_nodes_join(placer: str) -> None:
    w = World(placer)
    w.node(gpus=2, complete=False)
    call = Action(w.id(), "x", Kind.CALL, (1,), "service:typo")
    assert refusal(w.ledger, w.scheduler.state.placer, call) == "key: no service 'typo' is declared"


@pytest.mark.parametrize("degrees", [[2], [2, 4], [8]])
def test_the_simulator_reports_a_call_that_static_never_starts_in_one_line(
        degrees: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, cluster = tmp_path / "w.jsonl", tmp_path / "c.json"
    call = {"name": "x", "resource": "service:j", "work_s": 1, "degrees": degrees}
    work.write_text('{"format": "tangram-workload/1", "name": "w"}\n' + json.dumps(
        {"trajectory": "a", "start_s": 0, "turns": [{"think_s": 0, "actions": [call]}]}) + "\n")
    cluster.write_text(json.dumps({
        "nodes": [{"name": "g", "cpus": 4, "gpus": 8, "mem_mib": 100}],
        "services": [{"name": "j", "restore_s": 0.1}]}))
    files = [str(work), "--cluster", str(cluster)]
    assert main(["sim", *files, "--policy", "elastic"]) == 0
    capsys.readouterr()
    for latency in ([], ["--latency-us", "0"]):
        assert main(["sim", *files, "--policy", "static:1", *latency]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert "placer static:1 gives each call 1 GPU" in told
