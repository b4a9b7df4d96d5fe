"""Whatever a peer with the job's key sends, the broker accepts or refuses it and keeps serving
everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.absurd_messages import STEPS, play
from helpers.broker_rig import BrokerRig, FakePeer, action_of, serves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_hpc import LocalCluster
from tangram_hpc.domain.action import Action, Profile
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms

# ---- what is refused, and in which words -------------------------------------------------------


def refused(client: FakePeer) -> str:
    return str(client.last(ms.Rejected).text)


@pytest.mark.attack("rank", "broker")
def test_a_service_without_degrees_is_refused() -> None:
    rig = BrokerRig()
    worker, client, other = rig.worker(gpus=(0, 1)), rig.client(), rig.client("other")
    client.say(ms.DeclareService(1, ServiceSpec("s", backend="fake", degrees=())))
    assert "degrees" in refused(client)
    assert serves(rig, other, worker, 1)


@pytest.mark.attack("rank", "broker")
def test_a_worker_that_lends_a_core_twice_is_refused() -> None:
    rig = BrokerRig()
    worker, client, twice = rig.worker(), rig.client(), FakePeer(rig)
    twice.say(ms.WorkerHello(ms.PROTOCOL_VERSION, "j", NodeSpec("n", "h", (0, 0), 64)))
    assert "cores" in twice.last(ms.PeerRefused).text and twice.closed
    assert serves(rig, client, worker, 1)


@pytest.mark.parametrize(("fields", "field"), [
    ({"degrees": ()}, "cpus"), ({"degrees": (0,)}, "cpus"), ({"degrees": (2, 1)}, "cpus"),
    ({"degrees": (1 << 40,)}, "cpus"), ({"mem_mib": -1}, "mem"), ({"mem_mib": 1 << 63}, "mem"),
    ({"timeout_ns": -1}, "timeout"), ({"attempts_max": 0}, "attempts"), ({"gpus": -1}, "gpus"),
    ({"key": "moon"}, "key"), ({"name": "x" * 10_000}, "name"), ({"once": "x" * 300}, "once"),
    ({"profile": Profile(-1)}, "profile"), ({"session": mint(9, 9)}, "session"),
    ({"id": mint(7, 1)}, "id"), ({"id": 0}, "id"), ({"id": (1 << 64) - 1}, "id")])
@pytest.mark.parametrize("joined", [True, False], ids=["nodes are there", "nodes are awaited"])
@pytest.mark.attack("rank", "broker")
def test_a_wrong_action_is_refused_naming_its_field(
        fields: dict[str, Any], field: str, joined: bool) -> None:
    rig = BrokerRig(nodes=1 if joined else 2)
    worker, client, other = rig.worker(), rig.client(), rig.client("other")
    action = Action(**{"id": mint(1, 1), "name": "x", **fields})
    client.say(ms.Submit(action), b"call")
    assert field in refused(client)
    assert serves(rig, other, worker, 1)


@pytest.mark.parametrize(("message", "said"), [
    (ms.ReportToolReturn("p", "t", "pytest", -1, 0), "ReportToolReturn: characters: -1"),
    (ms.ReportToolReturn("p", "t", "pytest", 1, 7), "ReportToolReturn: status: 7"),
    (ms.ReportToolReturn("p", "x" * 10_000, "pytest", 1, 0), "ReportToolReturn: trajectory"),
    (ms.EndTrajectory("p", "t", 1 << 60), "EndTrajectory: tokens"),
    (ms.Shutdown("x" * 10_000), "Shutdown: reason"),
    (ms.ClientHello(ms.PROTOCOL_VERSION, "j", "u"), "ClientHello: a client may not"),
    (ms.ClientHello(1, "other", ""), "ClientHello: uid"),
    (ms.AttemptsStarted((1,)), "AttemptsStarted: a client may not"),
    (ms.Finished(1, Outcome(ActionState.COMPLETED), n=0), "Finished: a client may not"),
    (ms.WorkerHello(7, "j", NodeSpec("n", "h", (0, 0), 1)), "WorkerHello: cores"),
    (ms.Submit(Action(mint(1, 1), "x", degrees=())), "Submit: cpus"),
    (ms.RequestSession(SessionSpec(mint(1, 2), "s", -1)), "RequestSession: mem_mib"),
    (ms.RequestSession(SessionSpec(mint(1, 2), "s", 1, attach_hash="secret")),
     "RequestSession: attach_hash"),
    (ms.AttachSession(0, "x" * 10_000, "t"), "AttachSession: name"),
    (ms.AttachSession(0, "s", "t" * 10_000), "AttachSession: token"),
    (ms.AttachSession(0, "s", ""), "AttachSession: token"),
    (ms.Attached(0, SessionSpec(mint(1, 2))), "Attached: a client may not send this message"),
    (ms.DeclareService(0, ServiceSpec("")), "DeclareService: name"),
    (ms.Submit(Action(mint(1, 9), "x"), n=0), "without its payload")])
@pytest.mark.attack("rank", "sessions")
def test_a_client_keeps_its_sessions_and_actions_when_a_message_is_refused(
        message: Any, said: str) -> None:
    rig = BrokerRig()
    worker, client = rig.worker(), rig.client()
    client.say(ms.RequestSession(SessionSpec(mint(1, 2), "s", 1)))
    worker.say(ms.SandboxUp(mint(1, 2)))
    client.say(ms.Submit(action_of(client, 1)), b"call")
    before = len(client.all(ms.Rejected))
    client.say(message, b"call" if getattr(message, "n", 0) else None)
    (told,) = client.all(ms.Rejected)[before:]
    assert said in told.text and "\n" not in told.text and len(told.text) < 200
    assert told.id == (mint(1, 9) if "payload" in said else 0)
    assert not client.closed and not client.all(ms.PeerRefused) and not client.all(ms.SessionDown)
    worker.say(ms.Finished(worker.last(ms.StartAttempt).lease, Outcome(ActionState.COMPLETED), n=1),
               b"v")
    assert client.last(ms.ActionResult).action == mint(1, 1)
    assert serves(rig, client, worker, 3)


def test_a_client_logs_a_refused_message_and_keeps_its_futures(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(cpus=2, home=tmp_path) as cluster:
        _say_and_go_on(cluster, caplog)


def _say_and_go_on(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    connection = cluster.client._connection
    channel, opens = connection._channel, cluster.submit(["sleep", "0.5"])
    with connection._lock:
        connection._put(ms.ReportToolReturn("p", "t", "pytest", -1, 0))
    assert cluster.submit(pow, 2, 3).result(60) == 8 and opens.result(60).exit_code == 0
    assert connection._channel is channel
    (record,) = [r for r in caplog.records if r.name.startswith("tangram_hpc.client")]
    assert "ReportToolReturn: characters: -1" in record.getMessage()
    with pytest.raises(InvalidInput, match="tokens"):
        cluster.client._rollouts._pools.add("p")
        cluster.trajectory_ended("p", "t", 1 << 33)


@pytest.mark.attack("rank", "results")
def test_a_client_can_acknowledge_only_its_own_results() -> None:
    rig = BrokerRig()
    worker, victim, thief = rig.worker(), rig.client(), rig.client("thief")
    action = action_of(victim, 1)
    victim.say(ms.Submit(action), b"call")
    worker.say(ms.Finished(worker.last(ms.StartAttempt).lease, Outcome(ActionState.COMPLETED), n=1),
               b"v")
    thief.say(ms.Ack((action.id,)))
    victim.leave()
    back = rig.client()
    assert [m.action for m in back.all(ms.ActionResult)] == [action.id]


def test_a_finished_action_without_an_end_state_fails_naming_the_state() -> None:
    rig = BrokerRig()
    worker, client = rig.worker(), rig.client()
    client.say(ms.Submit(action_of(client, 1)), b"call")
    worker.say(ms.Finished(worker.last(ms.StartAttempt).lease, Outcome(ActionState.RUNNING)))
    outcome = client.last(ms.ActionResult).outcome
    assert outcome.state is ActionState.FAILED and "state" in outcome.reason
    assert serves(rig, client, worker, 2)


# ---- everything, in any order ------------------------------------------------------------------


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=STEPS, complete=st.booleans(), placer=st.sampled_from(["elastic", "first-fit",
                                                                    "static:2"]))
@pytest.mark.attack("rank", "broker")
def test_the_broker_keeps_serving_under_any_sequence_of_messages(
        tmp_path_factory: pytest.TempPathFactory, steps: list[Any], complete: bool, placer: str
        ) -> None:
    play(tmp_path_factory.mktemp("spool"), steps, complete, placer)
