"""A broker that is started again takes no snapshot for removed while its workers come back."""

from __future__ import annotations

import pytest
from helpers.broker_rig import BrokerRig, FakePeer

from tangram_hpc.broker.snapshots import LATE_S
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler

NAME = "snap-0123456789abcdef01234567"
REJOIN_S = 6.0


def joined(rig: BrokerRig, name: str, node: int = 0) -> FakePeer:
    """Lets a worker join, or come back as `node`."""
    peer = FakePeer(rig)
    peer.say(ms.WorkerHello(ms.PROTOCOL_VERSION, "j", NodeSpec(name, "host", (0, 1), 4096),
                            uid=name, node=node))
    return peer


@pytest.fixture
def rig() -> BrokerRig:
    """The second broker of a job with two nodes; it waits for both."""
    first = BrokerRig()
    joined(first, "n1")
    joined(first, "n2")
    scheduler = Scheduler(make_placer("elastic"))
    for event in first.journal.events:
        scheduler.handle(event)
    return BrokerRig(scheduler=scheduler, rejoin_s=REJOIN_S)


def orders(node: FakePeer) -> list[str]:
    node.say(ms.Ping())
    return [order.what for order in node.all(ms.SnapshotOrder)]


def test_a_node_that_waits_for_a_snapshot_is_back_before_the_node_that_has_it(rig: BrokerRig
                                                                              ) -> None:
    waits = joined(rig, "n1", 1)
    waits.say(ms.SnapshotReport(NAME, "wanted"))
    rig.run(REJOIN_S / 2)
    assert orders(waits) == []
    has = joined(rig, "n2", 2)
    has.say(ms.SnapshotReport(NAME, "held", session=7))
    assert orders(has) == ["publish"]
    has.say(ms.SnapshotReport(NAME, "published", files="archive"))
    assert orders(waits) == ["fetch"]


def test_the_node_that_waits_reports_while_the_other_one_is_being_welcomed(rig: BrokerRig) -> None:
    waits, has = joined(rig, "n1", 1), joined(rig, "n2", 2)
    waits.say(ms.SnapshotReport(NAME, "wanted"))
    has.say(ms.SnapshotReport(NAME, "held", session=7))
    assert orders(has) == ["publish"] and orders(waits) == []


def test_a_snapshot_is_missing_once_the_node_that_had_it_is_given_up(rig: BrokerRig) -> None:
    waits = joined(rig, "n1", 1)
    waits.say(ms.SnapshotReport(NAME, "wanted"))
    rig.run(REJOIN_S + 3 * LATE_S)
    assert orders(waits) == ["missing"]


def test_a_fetched_copy_stays_although_the_node_that_took_it_does_not_come_back(rig: BrokerRig
                                                                                ) -> None:
    copy = joined(rig, "n1", 1)
    copy.say(ms.SnapshotReport(NAME, "held"))
    rig.run(REJOIN_S + 3 * LATE_S)
    other = joined(rig, "n3")
    other.say(ms.SnapshotReport(NAME, "wanted"))
    assert orders(copy) == ["publish"]


def test_a_snapshot_that_is_removed_while_a_node_is_away_is_removed_there_too(rig: BrokerRig
                                                                              ) -> None:
    copy = joined(rig, "n1", 1)
    copy.say(ms.SnapshotReport(NAME, "held"))
    client = rig.client()
    rig.run(REJOIN_S / 2)  # meanwhile, the broker keeps clients waiting for workers
    client.say(ms.ManageSnapshot(1, "remove", NAME))
    assert orders(copy) == ["remove"]
    origin = joined(rig, "n2", 2)
    origin.say(ms.SnapshotReport(NAME, "held", session=7))
    assert orders(origin) == ["remove"]
