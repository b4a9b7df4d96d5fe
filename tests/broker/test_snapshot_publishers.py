"""Nodes that wait for the archive of a snapshot get it, or are told why not, whoever is lost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from helpers.broker_rig import BrokerRig, FakePeer

from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.protocol import message as ms

NAME = "snap-0123456789abcdef01234567"


@dataclass
class Nodes:
    """Two nodes that have the snapshot, and one that wants it. The first was ordered to publish."""

    first: FakePeer
    second: FakePeer
    third: FakePeer


@pytest.fixture
def nodes() -> Nodes:
    rig = BrokerRig()
    made = Nodes(*(rig.worker(name=f"n{number}") for number in (1, 2, 3)))
    made.first.say(ms.SnapshotReport(NAME, "held", session=7))
    made.second.say(ms.SnapshotReport(NAME, "held"))
    made.third.say(ms.SnapshotReport(NAME, "wanted"))
    assert orders(made.first) == ["publish"] and orders(made.second) == []
    return made


def orders(node: FakePeer) -> list[str]:
    return [order.what for order in node.all(ms.SnapshotOrder)]


@pytest.mark.parametrize("end", ["lost", "gone"])
def test_another_node_publishes_when_the_first_one_cannot(nodes: Nodes, end: str) -> None:
    if end == "lost":
        nodes.first.leave()
    else:
        nodes.first.say(ms.SnapshotReport(NAME, "gone"))
        nodes.first.say(ms.SnapshotReport(NAME, "published", why="it was removed"))
    assert orders(nodes.second) == ["publish"] and orders(nodes.third) == []
    nodes.second.say(ms.SnapshotReport(NAME, "published", files="archive"))
    assert nodes.third.last(ms.SnapshotOrder).files == "archive"


def test_nodes_are_told_when_the_last_node_that_had_it_is_lost(nodes: Nodes) -> None:
    nodes.first.leave()
    nodes.second.leave()
    assert orders(nodes.third) == ["missing"] and nodes.third.last(ms.SnapshotOrder).why


def test_a_node_that_fails_to_publish_is_asked_again_for_the_next_one(nodes: Nodes) -> None:
    nodes.first.say(ms.SnapshotReport(NAME, "published", why="the disk is full"))
    assert nodes.third.last(ms.SnapshotOrder).why == "the disk is full"
    nodes.third.say(ms.SnapshotReport(NAME, "wanted"))
    assert orders(nodes.first) == ["publish", "publish"]


def test_only_the_node_that_publishes_is_replaced(nodes: Nodes) -> None:
    nodes.second.leave()
    assert orders(nodes.first) == ["publish"]
    nodes.first.say(ms.SnapshotReport(NAME, "published", files="archive"))
    assert orders(nodes.third) == ["fetch"]


def test_the_request_of_a_session_names_the_nodes_that_have_its_snapshot() -> None:
    rig = BrokerRig()
    nodes = [rig.worker(name=f"n{number}") for number in (1, 2, 3)]
    nodes[2].say(ms.SnapshotReport(NAME, "held", session=7))
    third = rig.scheduler.ledger.next_node - 1
    client = rig.client()
    with_it, without = (mint(client.last(ms.Welcome).client, number) for number in (1, 2))
    client.say(ms.RequestSession(SessionSpec(with_it, snapshot=NAME)))
    client.say(ms.RequestSession(SessionSpec(without)))
    sessions = rig.scheduler.ledger.sessions
    assert sessions[with_it].snapshot_nodes == (third,) and not sessions[without].snapshot_nodes
    assert sessions[with_it].node == third != sessions[without].node
