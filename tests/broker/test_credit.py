"""How many plain actions the broker says that a client may have there."""

from __future__ import annotations

import pytest
from helpers.broker_rig import BrokerRig
from helpers.builders import World

from tangram_hpc.broker.turns import CREDIT, CREDIT_OF_NODE, credit_of
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.protocol import message as ms


def test_the_credit_follows_the_nodes_that_are_there() -> None:
    w = World()
    assert credit_of(w.ledger) == CREDIT == 16_384
    w.node(4)
    lost = w.node(4)
    assert credit_of(w.ledger) == CREDIT + 2 * CREDIT_OF_NODE
    w.happen(ev.NodeLost(w.now, lost, "its power went"))
    assert lost in w.ledger.nodes, "it is remembered"
    assert credit_of(w.ledger) == CREDIT + CREDIT_OF_NODE


@pytest.mark.parametrize("most", [0, 9])
def test_a_broker_that_may_ask_for_nodes_takes_all_actions(most: int) -> None:
    policy = AllocPolicy(max_nodes=most, max_core_ns=10**18,
                         shapes=(SatelliteShape("spare", cpus=4),))
    rig = BrokerRig(policy=policy)
    client = rig.client()
    client.say(ms.Ping(0))
    credit = 0 if most else CREDIT
    assert client.last(ms.Welcome).credit == client.last(ms.Pong).credit == credit
    if most:
        rig.broker.drain("the job ends")  # it asks for no more nodes
        client.say(ms.Ping(0))
        assert client.last(ms.Pong).credit == CREDIT
