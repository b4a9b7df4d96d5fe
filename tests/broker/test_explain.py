"""`tangram explain`: forecasts on a copy of the scheduler equal what then happens, and what the
answer says about an action."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers import forked_verb
from helpers.builders import World

from tangram_hpc import LocalCluster
from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.broker.queries.queue_view import queue
from tangram_hpc.broker.queries.wait_reasons import WaitReasons
from tangram_hpc.cli.views import explain_verb
from tangram_hpc.cli.views.explain_verb import lines
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.forecast import OPEN_MAX, forecast
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.progress import SimulatedAttempt
from tangram_hpc.simulator.workload import WorkAction

S = 10**9


def play_out(world: World, works: dict[int, WorkAction]) -> dict[int, int]:
    """Plays all actions to their end on modelled machines; returns action -> start time."""
    starts: dict[int, int] = {}
    runs: dict[int, SimulatedAttempt] = {}
    while True:
        while events := world.scheduler.plan(world.now):
            for order in [order for event in events for order in world.happen(event)]:
                if isinstance(order, de.StartLease):
                    starts[order.action] = world.now
                    units = world.ledger.leases[order.lease].units
                    runs[order.lease] = SimulatedAttempt(works[order.action], units, world.now, 0)
                elif isinstance(order, de.ResizeLease):
                    runs[order.lease].resize(world.now, len(order.cores))
        if not runs:
            return starts
        ends = [(run.end_at, lease) for lease, run in runs.items() if run.end_at is not None]
        deadline = world.scheduler.next_deadline()
        if deadline and (not ends or deadline < min(ends)[0]):
            world.now = max(deadline, world.now + 1)
            continue
        world.now = min(ends)[0]
        for lease in [lease for at, lease in sorted(ends) if at == world.now]:
            del runs[lease]
            world.happen(ev.LeaseFinished(world.now, lease, Outcome(ActionState.COMPLETED), True))


def is_policy(policy: str) -> bool:
    try:
        make_placer(policy)
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize(
    "placer", [*filter(is_policy, ["fcfs:4", "fcfs:2", "first-fit", "paper", "elastic"])])
def test_a_forecast_equals_the_start_times_that_follow(placer: str) -> None:
    world = World(placer)
    world.node(4)
    works = {}
    for i in range(24):
        degrees, serial = (1, 2, 4) if i % 3 else (2,), i % 4 / 10
        work = WorkAction(name="x", resource="cpu", work_s=(i * 7 % 11 + 1) / 4, degrees=degrees,
                          serial=serial)
        profile = Profile(round(work.work_s * S), round(serial * 10**6))
        works[world.submit(degrees, profile=profile)] = work
    told = {a: forecast(world.scheduler, a, world.now).at for a in works}
    assert len(world.ledger.ready) == 24, "a forecast changes nothing"
    assert play_out(world, works) == pytest.approx(told, abs=1000)  # sums of spans are rounded


def test_a_forecast_uses_learned_run_times_of_actions_without_a_profile() -> None:
    world = World("fcfs:4")
    world.node(2)
    first, second = world.submit(2), world.submit(2)
    world.plan()
    told = forecast(world.scheduler, second, world.now)
    assert told.at is None and "unknown" in told.why and told.rests_on == {"unknown": 1}
    world.now += 4 * S
    world.finish(first)
    world.plan()
    third = world.submit(2)
    told = forecast(world.scheduler, third, world.now)
    assert told.at is not None and S < told.at - world.now < 8 * S
    assert told.rests_on == {"learned": 1}


def test_explain_tells_the_reason_the_actions_ahead_and_the_holders_of_the_units() -> None:
    world = World("fcfs:4")
    world.node(2)
    profile = Profile(2 * S)
    first = world.submit(2, profile=profile)
    world.plan()
    others = [world.submit((1, 2), profile=profile) for _ in range(3)]
    last = world.submit(1, profile=profile)
    told = explain(world.scheduler, world.now, show(last))
    assert (told["state"], told["reason"], told["ahead"]) == ("PENDING", "Resources", 3)
    assert told["ahead_shapes"] == [
        {"name": "x", "key": "cpu", "degrees": [1, 2], "count": 3}]
    assert [h["id"] for h in told["held_by"]] == [show(first)]
    assert told["start"]["rests_on"] == {"profile": 4}
    running = explain(world.scheduler, world.now, show(first))
    assert (running["units"], running["node"]) == (2, "n1") and running["ends_in_s"] > 0
    assert running["ends_between_s"] == [running["ends_in_s"]] * 2, "a profile has no spread"
    assert told["start"]["between_s"] == [told["start"]["in_s"]] * 2
    assert told["end"]["in_s"] == pytest.approx(told["start"]["in_s"] + 2)
    assert told["end"]["between_s"] == [told["end"]["in_s"]] * 2 and told["level"] == 0.8
    text = "\n".join(lines(told))
    seconds = f"{told['start']['in_s']:.1f}"
    assert f"expected start: in {seconds} s (80 %: {seconds} to {seconds} s) on n1" in text
    world.finish(first, ActionState.FAILED)
    assert explain(world.scheduler, world.now, show(first))["state"] == "FAILED"
    for wrong in ("nonsense", "1.99", "-1.2", show(others[0]) + ".1"):
        assert "error" in explain(world.scheduler, world.now, wrong)


def test_explain_names_who_holds_the_gpus_that_a_call_or_a_command_waits_for() -> None:
    """Both are served from the same GPUs, though their queues are two."""
    world = World("elastic")
    world.node(cpus=4, gpus=2)
    world.happen(ev.ServiceDeclared(world.now, ServiceSpec("judge", degrees=(2,))))
    command = world.submit(gpus=1)
    world.plan()
    call = world.submit((2,), kind=Kind.CALL, key="service:judge")
    world.plan()
    told = explain(world.scheduler, world.now, show(call))
    assert (told["reason"], told["holders"]) == ("Resources", 1)
    assert [h["id"] for h in told["held_by"]] == [show(command)]
    row, = queue(world.scheduler, "state=PENDING", world.now)["queue"]
    assert (row["action"], row["gpus"]) == (show(call), 2)
    world.finish(command)
    world.plan()
    later = world.submit(gpus=1)
    told = explain(world.scheduler, world.now, show(later))
    assert [h["id"] for h in told["held_by"]] == [show(call)]


def test_an_action_whose_client_is_not_back_does_not_seem_to_wait_for_resources() -> None:
    world = World("elastic")
    world.node(cpus=2)
    action = world.submit()
    world.happen(ev.BrokerStarted(world.now, "j", "elastic", "none", await_until=world.now + S))
    entry = world.ledger.actions[action]
    assert entry.withheld
    assert explain(world.scheduler, world.now, show(action))["reason"] == "ClientNotBack"
    assert WaitReasons(world.scheduler, world.now).of(entry) == "ClientNotBack"


def test_explain_names_only_nodes_that_could_run_the_action() -> None:
    world = World("fcfs:4")
    small, drained, big = (world.node(cpus, gpus=1, component=name, complete=False)
                           for cpus, name in ((2, "small"), (8, "drained"), (8, "big")))
    on = {world.submit(1, component=name): node for node, name in
          ((small, "small"), (drained, "drained"), (big, "big"))}
    world.plan()
    world.happen(ev.NodeDraining(world.now, drained, "the admin"))
    world.happen(ev.ServiceDeclared(world.now, ServiceSpec("judge", node="n3", gpus=(0,))))
    wide, there = world.submit(8), world.submit(8, component="big")
    for action in (wide, there):
        told = explain(world.scheduler, world.now, show(action))
        assert told["reason"] == "Resources"
        assert [held["id"] for held in told["held_by"]] == [
            show(action) for action, node in on.items() if node == big], "the others never can"
    world.happen(ev.NodeLost(world.now, big, "its machine is gone"))
    call = Action(world.id(), "judge", Kind.CALL, key="service:judge")
    world.happen(ev.ActionSubmitted(world.now, call))
    narrow = world.submit(2, component="small")
    for action in (wide, there, call.id, narrow):
        told = explain(world.scheduler, world.now, show(action))
        wanted = "Resources" if action == narrow else "ReqNodeNotAvail"
        assert told["reason"] == wanted, show(action)
    assert WaitReasons(world.scheduler, world.now).counts() == {
        "Resources": 1, "ReqNodeNotAvail": 3}


def test_explain_states_an_interval_of_what_was_learned_and_none_of_what_is_unknown() -> None:
    world = World("fcfs:1")
    world.node(1)
    first, second = world.submit(1), world.submit(1)
    world.plan()
    told = explain(world.scheduler, world.now, show(second))
    assert told["start"]["between_s"] is None and told["end"]["between_s"] is None
    assert "unknown" in told["start"]["why_no_interval"]
    assert explain(world.scheduler, world.now, show(first))["ends_between_s"] is None
    assert "expected end: unknown (run time: unknown)" in lines(
        explain(world.scheduler, world.now, show(first)))[-1]
    for action in (first, second):
        world.now += 4 * S
        world.finish(action)
        world.plan()
    third, fourth = world.submit(1), world.submit(1)
    world.plan()
    told = explain(world.scheduler, world.now, show(fourth))
    for what in ("start", "end"):
        low, high = told[what]["between_s"]
        assert 0 < low < told[what]["in_s"] < high
    assert told["start"]["why_no_interval"] == ""
    low, high = explain(world.scheduler, world.now, show(third))["ends_between_s"]
    assert 0 < low < 4 < high
    ahead = [world.submit(1) for _ in range(900)][-1]
    told = explain(world.scheduler, world.now, show(ahead))
    assert told["start"]["in_s"] > 0 and told["start"]["between_s"] is None
    assert "no interval of the start is known: it lies too many events ahead for an interval" in (
        lines(told))


def test_explain_tells_of_an_action_whose_session_waits() -> None:
    world = World("fcfs:4")
    world.node(2, mem=10)
    one, two = world.session(mem=10), world.session(mem=10)
    early, late = world.submit(1, session=one), world.submit(1, session=two)
    told = explain(world.scheduler, world.now, show(late))
    assert told["reason"] == "SessionPriority" and told["start"]["in_s"] is None
    assert "session" in told["start"]["why"]
    assert explain(world.scheduler, world.now, show(early))["start"]["in_s"] == 0


def test_a_forecast_is_refused_beyond_the_limit_of_open_actions() -> None:
    world = World("fcfs:1")
    world.node(1)
    last = [world.submit(1, profile=Profile(S)) for _ in range(OPEN_MAX + 1)][-1]
    told = forecast(world.scheduler, last, world.now)
    assert told.at is None and str(OPEN_MAX) in told.why


def test_tangram_explain_works_on_a_running_cluster(tmp_path: Path) -> None:
    def tangram(*words: str) -> subprocess.CompletedProcess[str]:
        return forked_verb.tangram("explain", *words, env={
            **os.environ, "TANGRAM_HOME": str(tmp_path), "TANGRAM_ACCESS": str(c.access)})

    with LocalCluster(cpus=1, home=tmp_path, placer="fcfs:1") as c:  # who is first is certain
        done = c.submit(["true"])
        done.result()
        long = c.submit(["sleep", "60"], profile=Profile(60 * S))
        waits = c.submit(["true"])
        told = json.loads(tangram(waits.id, "--json").stdout)
        assert told["state"] == "PENDING" and 0 < told["start"]["in_s"] <= 60
        assert told["start"]["rests_on"] == {"profile": 1}
        assert "expected start: in " in tangram(waits.id).stdout
        assert "expected end: in " in tangram(long.id).stdout
        assert "exit code 0" in tangram(done.id).stdout
        for wrong, count in (("9.99", 1), ("x", 2)):  # no id at all: the verb's usage, and one line
            told_wrong = tangram(wrong)
            assert told_wrong.returncode == 2, told_wrong
            assert told_wrong.stderr.count("\n") == count, told_wrong
        long.cancel()
        waits.result()
    assert "exit code 0" in tangram(waits.id, "-j", c.job).stdout


def test_explain_does_not_say_that_an_open_action_has_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while the broker is silent, nor of an action that the job's next start goes on with;
    an action whose broker was killed has the end that `acct` gives it.
    """
    def told(action: str) -> str:
        """What the journal says, as it is asked when the broker does not answer."""
        answer = explain_verb._from_journal(c.job, action, "")
        assert answer is not None
        return lines(answer)[1]

    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    with LocalCluster(cpus=1, home=tmp_path, placer="fcfs:1", warm=0) as c:
        named = c.submit(["sleep", "600"], once="step/1")
        plain = c.submit(["true"])
        c.ask("info")  # the broker has both
        assert told(plain.id) == "has not ended: the job's broker does not answer"
    assert told(named.id).endswith(
        "the job's next start goes on with it, because of once='step/1'")
    assert told(plain.id).endswith("exit code 130, its broker ended (its run is over)")
    journal = c.folder / "journal"
    journal.write_bytes(journal.read_bytes()[:-1])  # as a broker leaves it that is killed
    assert told(plain.id).endswith("exit code 1, its broker was killed")


def test_explain_takes_leases_into_account_behind_which_others_could_be_prefetched() -> None:
    world = World("elastic")
    world.node(cpus=2, ahead=8)
    long, short = Profile(60 * S), Profile(1000)
    world.submit(1, profile=long)
    world.submit(1, profile=short)
    world.plan()
    assert world.ledger.short
    wide = world.submit(2, profile=long)
    world.plan()
    assert explain(world.scheduler, world.now, show(wide))["state"] == "PENDING"
