"""A broker that did not run for a while (stopped, suspended, frozen) reads what has arrived before
it takes any peer's silence for a loss."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.broker_rig import BrokerRig, action_of, serves
from helpers.cluster_parts import broker_of

from tangram_hpc import LocalCluster
from tangram_hpc.broker.driver import SILENCE_S
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import NodeState
from tangram_hpc.protocol import message as ms


def test_a_broker_that_was_stopped_declares_no_worker_dead() -> None:
    rig = BrokerRig()
    client, worker = rig.client(), rig.worker()
    rig.run(5)
    worker.say(ms.Ping())
    rig.stall(SILENCE_S + 5)
    assert not worker.closed and rig.scheduler.ledger.nodes[1].state is NodeState.UP
    worker.say(ms.Ping())  # it lay in the socket
    assert serves(rig, client, worker, 1)


def test_a_worker_stopped_together_with_its_broker_gets_the_whole_silence_limit() -> None:
    rig = BrokerRig()
    rig.client()
    worker = rig.worker()
    rig.stall(120)
    rig.run(SILENCE_S - 5)  # it is slower to go on than the broker
    worker.say(ms.Ping())
    assert not worker.closed
    rig.run(SILENCE_S + 5)  # and a real silence is one still
    assert worker.closed


def test_a_lost_client_keeps_the_rest_of_its_grace_period_over_a_broker_stall() -> None:
    rig = BrokerRig(grace_s=30)
    client, worker = rig.client(), rig.worker()
    action = action_of(client, 1)
    client.say(ms.Submit(action), b"call")
    client.leave()
    rig.run(20)
    worker.say(ms.Ping())
    rig.stall(60)
    back = rig.client()
    assert not back.last(ms.Welcome).fresh
    assert action.id in rig.scheduler.ledger.actions
    back.leave()
    rig.run(15)
    worker.say(ms.Ping())
    rig.run(16)
    assert rig.client().last(ms.Welcome).fresh  # a grace is as long as ever while it runs


def test_a_sessions_idle_time_does_not_count_a_broker_stall() -> None:
    rig = BrokerRig()
    client, worker = rig.client(), rig.worker()
    spec = SessionSpec(mint(1, 1), idle_ns=20 * 10**9)
    client.say(ms.RequestSession(spec))
    worker.say(ms.SandboxUp(spec.id))
    rig.run(10)
    rig.stall(60)
    client.say(ms.RenewSession(spec.id))  # it lay in the socket
    rig.run(5)
    assert not worker.all(ms.CloseSandbox)
    rig.run(21)
    assert worker.all(ms.CloseSandbox)


def test_grace_and_idle_times_begun_just_before_a_stall_do_not_count_it() -> None:
    rig = BrokerRig(grace_s=30)
    client, worker = rig.client(), rig.worker()
    spec = SessionSpec(mint(1, 1), idle_ns=20 * 10**9)
    client.say(ms.RequestSession(spec))
    worker.say(ms.SandboxUp(spec.id))
    rig.run(5)
    client.say(ms.RenewSession(spec.id))
    client.leave()
    rig.run(1)
    rig.stall(60)
    rig.run(1)
    assert not worker.all(ms.CloseSandbox)
    assert not rig.client().last(ms.Welcome).fresh


def test_the_time_for_nodes_to_join_does_not_count_a_broker_stall() -> None:
    """Otherwise an action that waits for the largest node would be refused as infeasible."""
    rig = BrokerRig(nodes=2, join_s=20)
    client = rig.client()
    rig.worker(2, "small")
    rig.run(5)
    action = action_of(client, 1, degrees=(8,))
    client.say(ms.Submit(action), b"call")
    rig.stall(SILENCE_S - 5)
    large = rig.worker(8, "large")  # its hello lay in the socket
    assert not client.all(ms.ActionResult)
    assert large.last(ms.StartAttempt).action == action


@pytest.mark.long
def test_a_live_broker_that_was_stopped_keeps_its_sessions(tmp_path: Path) -> None:
    with LocalCluster(cpus=2, workers=2, home=tmp_path) as c:
        with c.session(mem=10) as session:
            session.write("state", "kept").result(60)
            running = c.submit(["sleep", "5"])
            broker = broker_of(c).pid
            os.kill(broker, signal.SIGSTOP)
            try:
                time.sleep(SILENCE_S + 6)
            finally:
                os.kill(broker, signal.SIGCONT)
            assert session.read("state").result(60) == b"kept"
            assert running.result(60).exit_code == 0 and running.details.attempt == 1
        assert [n["state"] for n in c.ask("nodes")["nodes"]] == ["UP", "UP"]
