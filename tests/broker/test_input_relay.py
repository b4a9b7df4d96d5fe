"""The broker passes signals and sizes of terminals on to workers, and loses none for an action that
has not begun."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.builders import World

from tangram_hpc.broker.input_relay import InputRelay
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.input_flow import RESIZE, SIGNAL

INT = 2


class FakePeers:
    """Keeps the lease and the number of each signal that a worker would receive."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def send_to_worker(self, node: int, message: ms.Input, payload: Any = None) -> None:
        assert node and payload is None
        self.sent.append((message.id, message.number))


@pytest.fixture
def world() -> World:
    """One core whose worker takes prefetched leases, with an action on it."""
    w = World("elastic")
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n1", "h", (0,), 64, ahead=8, backends=("model",),
                                          untrusted=("model",))))
    w.happen(ev.NodesComplete(0, 1))
    return w


def test_a_signal_for_a_prefetched_action_is_sent_again_with_its_next_lease(world: World) -> None:
    first, second = (world.submit(profile=Profile(1000)) for _ in range(2))
    world.plan()
    peers = FakePeers()
    relay = InputRelay(world.ledger, peers)  # type: ignore[arg-type]
    prefetched = world.lease_of(second)
    assert not world.ledger.leases[prefetched].begun
    assert relay.from_client(1, ms.Input(second, SIGNAL, INT), None) == ""
    assert peers.sent == [(prefetched, INT)]
    world.happen(ev.LeaseReturned(world.now, prefetched))  # the worker gives it back unbegun
    world.finish(first)
    world.plan()
    begun = world.lease_of(second)
    relay.started(second, begun)
    assert world.ledger.leases[begun].begun and begun != prefetched
    assert peers.sent[1:] == [(begun, INT)]
    relay.started(second, begun)
    assert len(peers.sent) == 2, "a lease that has begun gets it once"


def test_a_signal_for_a_waiting_action_is_sent_when_it_starts(world: World) -> None:
    action = world.submit()
    peers = FakePeers()
    relay = InputRelay(world.ledger, peers)  # type: ignore[arg-type]
    assert relay.from_client(1, ms.Input(action, SIGNAL, INT), None) == ""
    assert peers.sent == []
    world.plan()
    relay.started(action, world.lease_of(action))
    assert peers.sent == [(world.lease_of(action), INT)]


def test_the_last_size_of_a_waiting_terminal_is_sent_before_a_signal(world: World) -> None:
    action = world.submit()
    peers = FakePeers()
    relay = InputRelay(world.ledger, peers)  # type: ignore[arg-type]
    for rows in (30, 40):
        assert relay.from_client(1, ms.Input(action, RESIZE, rows, 90), None) == ""
    assert relay.from_client(1, ms.Input(action, SIGNAL, INT), None) == ""
    world.plan()
    relay.started(action, world.lease_of(action))
    assert [number for _, number in peers.sent] == [40, INT]
