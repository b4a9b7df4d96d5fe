"""The four drivers, when a peer that has proven the job's key says anything: none raises anything
but its own refusal, and each goes on to serve others.
"""

from __future__ import annotations

import shutil
from collections import deque
from typing import Any

from helpers.absurd_messages import STEPS, play
from helpers.broker_rig import FakePeer
from helpers.fuzz_inputs import SHORT, any_of, members, scratch
from helpers.gateway_rig import Rig as GatewayRig
from helpers.link_rig import LinkRig
from helpers.worker_rig import Rig as WorkerRig
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ProtocolError, TangramError
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import relay

MESSAGES = st.one_of([any_of(kind) for kind in members(ms.AnyMessage)])
PAYLOAD = st.sampled_from([b"", b"{}", b"null", b"[", b"\xff"]) | st.binary(max_size=9)
SAID = st.lists(st.tuples(MESSAGES, PAYLOAD), min_size=1, max_size=8)


def payload_of(message: Any, payload: bytes) -> bytes | None:
    return payload if getattr(message, "n", 0) else None


@SHORT
@given(STEPS, st.booleans(), st.sampled_from(["elastic", "first-fit", "static:2"]))
def test_broker(steps: list[Any], complete: bool, placer: str) -> None:
    folder = scratch() / "spool"
    shutil.rmtree(folder, ignore_errors=True)
    play(folder, steps, complete, placer)


@SHORT
@given(SAID, st.booleans(), st.booleans())
def test_worker(said: list[tuple[Any, bytes]], joins: bool, comes_back: bool) -> None:
    rig = WorkerRig("u", joins=joins)
    for message, payload in said:
        content = payload_of(message, payload)
        try:
            rig.driver.receive(message, None if content is None else memoryview(content))
        except ProtocolError:
            pass  # its caller ends the connection then
        rig.hand.turn(0.1)
        if comes_back and not rig.wire.closed and not rig.ended:
            rig.dial()
    if joins and not comes_back and not rig.ended:
        rig.start(4711)
        rig.hand.turn()
        assert ("start", 4711) in [(name, *[order.lease for order in args[:1]])
                                   for name, *args in rig.orders.got if name == "start"]


class Told:
    """One client for many examples, as long as the broker has not ended it."""

    def __init__(self) -> None:
        self.rig = LinkRig(scratch() / "store")
        self.over = False

    def hears(self, said: list[tuple[Any, bytes]]) -> None:
        """The client's thread reads these messages, and then the honest end of an action."""
        rig = self.rig
        before = len(rig.worker.all(ms.StartAttempt))
        future = rig.client.submit(["true"])
        rig.until(lambda: len(rig.worker.all(ms.StartAttempt)) > before, "a start")
        peer: FakePeer = rig.channel.peer
        with rig.changed:
            peer.heard += [(message, payload_of(message, payload)) for message, payload in said]
            rig.changed.notify_all()
        rig.worker_says(ms.Finished(rig.worker.last(ms.StartAttempt).lease,
                                    Outcome(ActionState.COMPLETED), n=1), b"\x93\x08\0\0")
        error = future.exception(30)
        assert error is None or isinstance(error, TangramError), error
        self.over = any(isinstance(m, ms.Shutdown | ms.PeerRefused) for m, _ in said) or (
            rig.client._connection.failure is not None)


_TOLD: deque[Told] = deque()


@SHORT
@given(SAID)
def test_client(said: list[tuple[Any, bytes]]) -> None:
    if not _TOLD or _TOLD[-1].over:
        while _TOLD:
            _TOLD.pop().rig.close()
        _TOLD.append(Told())
    told = _TOLD[-1]
    told.over = True  # unless all goes well
    told.hears(said)


@SHORT
@given(st.lists(st.tuples(st.sampled_from([0, 0, 1]), st.integers(-1, 12),
                          st.binary(max_size=6), st.sampled_from([0, 0, 0, 1, 20])), max_size=12))
def test_gateway(heard: list[tuple[int, int, bytes, int]]) -> None:
    rig = GatewayRig((0, 1, 2))
    for rank, tag, data, seconds in heard:
        rig.hear(rank, tag, data)
        rig.hear(2, relay.BEAT)
        rig.later(seconds)
    rig.hear(2, relay.OPEN, b"\1\0\0\0")
    rig.hear(2, relay.DATA, b"abc")
    assert rig.pipes.calls[-2:] == [("open", 2), ("write", 2, b"abc")]
