"""Messages of a client and of a worker, absurd ones among them, in any order, for a real broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from helpers.broker_rig import BrokerRig, FakePeer, action_of
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import RolloutService, RolloutsSpec, Turn
from tangram_hpc.domain.service import EndpointSpec, ServiceSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.session_token import attach_token, hash_of
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.spool import FileSpool

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


def play(folder: Path, steps: list[Any], complete: bool, placer: str) -> None:
    """Lets a broker with a real spool get these messages, and checks that it serves others after
    them; its ledger's laws are proven after every message.
    """
    spool = FileSpool(folder, 1 << 20)
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
