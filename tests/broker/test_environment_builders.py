"""Who waits for a prepared environment gets it or builds it, whoever stops waiting before."""

from __future__ import annotations

from helpers.broker_rig import BrokerRig, FakePeer

from tangram_hpc.protocol import message as ms

ENVIRONMENT = "0" * 64


def answers(client: FakePeer) -> list[bytes | None]:
    return [payload for message, payload in client.heard if isinstance(message, ms.QueryReply)]


def test_a_client_that_waits_no_more_does_not_become_the_builder() -> None:
    rig = BrokerRig()
    builder, interrupted, last = (rig.client(uid) for uid in "abc")
    for client in (builder, interrupted, last):
        client.say(ms.ManageSnapshot(1, "prepare", ENVIRONMENT))
    interrupted.say(ms.ManageSnapshot(2, "failed", ENVIRONMENT, "interrupted"))
    assert answers(interrupted) == [b"{}"]
    assert answers(builder) == [b'{"build": true}'] and answers(last) == []
    builder.say(ms.Bye())
    builder.leave()
    rig.run(0.1)
    assert answers(interrupted) == [b"{}"] and answers(last) == [b'{"build": true}']
