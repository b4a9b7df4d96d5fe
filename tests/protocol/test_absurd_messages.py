"""Whatever a peer with the job's key sends, the broker accepts or refuses it and keeps serving
everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.broker_rig import BrokerRig, FakePeer, action_of, serves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_hpc import LocalCluster
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import RolloutService, RolloutsSpec, Turn
from tangram_hpc.domain.service import EndpointSpec, ServiceSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.session_token import attach_token, hash_of
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.spool import FileSpool

# ---- what is refused, and in which words -------------------------------------------------------


def refused(client: FakePeer) -> str:
    return str(client.last(ms.Rejected).text)


def test_a_service_without_degrees_is_refused() -> None:
    rig = BrokerRig()
    worker, client, other = rig.worker(gpus=(0, 1)), rig.client(), rig.client("other")
    client.say(ms.DeclareService(1, ServiceSpec("s", backend="fake", degrees=())))
    assert "degrees" in refused(client)
    assert serves(rig, other, worker, 1)


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

NUMBER = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([-(1 << 63), -(1 << 31), 1 << 16, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40,
                     10**18, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]))
WORD = st.sampled_from(["", "a", "a", "a", "b", "cpu", "service:a", "endpoint:a", "rollouts:a",
                        "service:", "endpoint:", "fake", "stop", "nearest", "x" * 5000, "n1", "0",
                        "1+0", "\0", "🦆", "explain", "info", "1.1", "2.-1", "f" * 64])
IDS = st.one_of(st.sampled_from([mint(c, n) for c in (1, 2, 3) for n in (1, 2, 3)]), NUMBER)
NUMBERS = st.lists(NUMBER, max_size=4).map(tuple)
NODE = st.builds(NodeSpec, WORD, WORD, NUMBERS, NUMBER, NUMBERS, WORD, st.booleans(), NUMBER,
                 st.lists(WORD, max_size=2).map(tuple), st.lists(WORD, max_size=2).map(tuple),
                 NUMBER, WORD, WORD, WORD, st.lists(NUMBERS, max_size=2).map(tuple))
TURN = st.builds(Turn, WORD, WORD, NUMBER, NUMBER, NUMBER)
ACTION = st.builds(
    Action, IDS, WORD, st.sampled_from(Kind), st.one_of(st.just((1,)), NUMBERS),
    st.one_of(st.just("cpu"), WORD), st.one_of(st.just(0), NUMBER), st.one_of(st.just(0), NUMBER),
    st.one_of(st.just(0), IDS), st.one_of(st.just(0), NUMBER), st.one_of(st.just(1), NUMBER),
    st.booleans(), st.one_of(st.just(""), WORD),
    st.one_of(st.none(), st.builds(Profile, NUMBER, NUMBER)), st.booleans(),
    st.one_of(st.just(""), WORD), st.one_of(st.just(""), WORD), st.one_of(st.none(), TURN))
SESSION = st.builds(
    SessionSpec, IDS, WORD, st.one_of(st.just(0), NUMBER), st.one_of(st.just(""), WORD),
    st.booleans(), st.one_of(st.just(""), WORD), st.one_of(st.just(""), WORD), st.booleans(),
    st.one_of(st.just(0), NUMBER), st.booleans(), st.one_of(st.just("stop"), WORD),
    st.one_of(st.just(0), IDS), st.one_of(st.just(0), NUMBER), st.one_of(st.just(-1), NUMBER),
    st.booleans(), st.one_of(st.just(""), WORD))
OUTCOME = st.builds(Outcome, st.sampled_from(ActionState), *[NUMBER] * 5, WORD, WORD, WORD,
                    *[NUMBER] * 8)
SERVICE = st.builds(ServiceSpec, WORD, NUMBER, NUMBER, NUMBER, st.one_of(st.just("fake"), WORD),
                    st.binary(max_size=3), st.one_of(st.just((1,)), NUMBERS), NUMBER, NUMBER, WORD,
                    st.one_of(st.just(""), WORD), st.one_of(st.just(()), NUMBERS))
ENDPOINT = st.builds(EndpointSpec, WORD, NUMBER, NUMBER, NUMBER)
MEMBER = st.builds(RolloutService, WORD, NUMBER, *[NUMBER] * 7, WORD)
POOL = st.one_of(
    st.builds(RolloutsSpec, WORD, NUMBERS, st.lists(MEMBER, max_size=2).map(tuple)),
    st.builds(RolloutsSpec, WORD, NUMBERS, st.lists(MEMBER, max_size=2).map(tuple), WORD, WORD,
              st.tuples(NUMBER, NUMBER), *[NUMBER] * 5, st.booleans(), st.booleans(),
              *[NUMBER] * 7))
PIECE = st.binary(max_size=3)
SHARED = st.builds(SessionSpec, IDS, st.just("s"), st.integers(0, 5), outlives=st.booleans(),
                   attach_hash=st.just(hash_of(attach_token("t"))),
                   close_hash=st.just(hash_of("t")),
                   ttl_ns=st.sampled_from([0, 1, 10**9, 10**12]))
TOKENS = st.sampled_from(["t", "t", attach_token("t"), "wrong"]) | WORD
FROM_CLIENT = st.one_of(
    st.builds(ms.Submit, ACTION), st.builds(ms.Submit, ACTION), st.builds(ms.Cancel, st.lists(
        IDS, max_size=3).map(tuple)),
    st.builds(ms.RequestSession, SESSION, st.booleans()), st.builds(ms.ReleaseSession, IDS),
    st.builds(ms.RequestSession, SHARED, st.booleans()), st.builds(ms.DetachSession, IDS),
    st.builds(ms.AttachSession, NUMBER, st.just("s") | WORD, TOKENS, st.booleans(),
              st.just(0) | IDS),
    st.builds(ms.RenewSession, IDS), st.builds(ms.Ack, st.lists(IDS, max_size=3).map(tuple)),
    st.builds(ms.Query, NUMBER, WORD, WORD), st.builds(ms.DeclareService, NUMBER, SERVICE),
    st.builds(ms.DeclareEndpoint, NUMBER, ENDPOINT), st.builds(ms.DeclareRollouts, NUMBER, POOL),
    st.builds(ms.ReportToolReturn, WORD, WORD, WORD, NUMBER, NUMBER),
    st.builds(ms.EndTrajectory, WORD, WORD, NUMBER, NUMBER),
    st.builds(ms.Forget, NUMBER, st.lists(WORD, max_size=2).map(tuple), WORD),
    st.builds(ms.GrantEnded, IDS, NUMBER, OUTCOME), st.builds(ms.Ping, NUMBER), st.just(ms.Bye()),
    st.builds(ms.ClientHello, NUMBER, WORD, WORD, WORD, NUMBER, NUMBER, WORD),
    st.builds(ms.ClientHello, st.just(ms.PROTOCOL_VERSION), st.just("j"), WORD, WORD, NUMBER,
              NUMBER))
LEASES = st.lists(st.one_of(st.integers(1, 6), NUMBER), max_size=3).map(tuple)
LEASE = st.one_of(st.integers(1, 6), NUMBER)
FROM_WORKER = st.one_of(
    st.builds(ms.WorkerHello, st.just(ms.PROTOCOL_VERSION), st.just("j"), NODE),
    st.builds(ms.AttemptsStarted, LEASES), st.builds(ms.Finished, LEASE, OUTCOME, st.booleans()),
    st.builds(ms.Finished, LEASE, st.builds(Outcome, st.sampled_from(ActionState)), st.booleans()),
    st.builds(ms.Released, LEASE), st.builds(ms.Returned, LEASES), st.builds(ms.Leaving, WORD),
    st.builds(ms.SandboxUp, IDS), st.builds(ms.SandboxDown, IDS, WORD),
    st.builds(ms.SandboxPacked, IDS, WORD), st.builds(ms.Output, LEASE, NUMBER),
    st.builds(ms.Pong, NUMBER), st.builds(ms.PeerRefused, WORD), st.builds(ms.Welcome, NUMBER, WORD,
                                                                           WORD, WORD, WORD,
                                                                           st.floats()))
STEPS = st.lists(st.tuples(
    st.sampled_from(["client", "client", "worker"]), FROM_CLIENT | FROM_WORKER, PIECE,
    st.sampled_from([0.0, 0.0, 0.1, 40.0])), max_size=25)


class Absurd:
    """A client and a worker that send given messages, and reconnect when the broker closes them."""

    def __init__(self, rig: BrokerRig, complete: bool) -> None:
        self.rig = rig
        self.peers = {"client": rig.client("absurd"), "worker": self.worker()}
        if complete:
            rig.run(0.1)

    def worker(self) -> FakePeer:
        return self.rig.worker(4, "absurd", gpus=(0, 1, 2, 3), ahead=2)

    def say(self, who: str, message: Any, payload: bytes) -> None:
        peer = self.peers[who]
        if peer.closed:
            peer = self.peers[who] = (self.rig.client("absurd") if who == "client"
                                      else self.worker())
        peer.say(message, payload if getattr(message, "n", 0) else None)


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=STEPS, complete=st.booleans(), placer=st.sampled_from(["elastic", "first-fit",
                                                                    "static:2"]))
def test_the_broker_keeps_serving_under_any_sequence_of_messages(
        tmp_path_factory: pytest.TempPathFactory, steps: list[Any], complete: bool, placer: str
        ) -> None:
    spool = FileSpool(tmp_path_factory.mktemp("spool"), 1 << 20)
    rig = BrokerRig(placer, spool=spool, nodes=1 if complete else 9)
    absurd = Absurd(rig, complete)
    for who, message, payload, seconds in steps:
        absurd.say(who, message, payload)
        rig.run(seconds)
    client, worker = rig.client("honest"), rig.worker(4, "honest", component="honest")
    for number in (1, 2):
        action = action_of(client, number, component="honest")
        client.say(ms.Submit(action), b"call")
        started = {start.action.id: start.lease for start in worker.all(ms.StartAttempt)}
        assert action.id in started
        worker.say(ms.Finished(started[action.id], Outcome(ActionState.COMPLETED), n=1), b"done")
        assert client.last(ms.ActionResult).outcome.state is ActionState.COMPLETED
    client.say(ms.Query(1, "info"))
    assert client.all(ms.QueryReply)
    spool.close(remove=True)
