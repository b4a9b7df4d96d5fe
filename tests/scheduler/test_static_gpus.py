"""The GPUs that `static:K` gives to each service, when nodes come and go."""

from __future__ import annotations

from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.service import ServiceSpec


def two_nodes(first_ends_at: int = 0) -> World:
    """Two nodes of two GPUs, and the services `a` and `b`. At first `b` has the second GPU of the
    first node; when that node is gone, it has the second GPU of the other one.
    """
    w = World("static:1")
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n1", "h", (0,), 100, (0, 1), ends_at_ns=first_ends_at)))
    w.node(gpus=2)
    for name in ("a", "b"):
        w.happen(ev.ServiceDeclared(0, ServiceSpec(name)))
    return w


def test_a_waiting_call_starts_on_another_node_when_its_own_is_drained() -> None:
    w = two_nodes()
    first = w.submit(kind=Kind.CALL, key="service:b")
    assert started(w.plan()) == [first]
    second = w.submit(kind=Kind.CALL, key="service:b")
    assert started(w.plan()) == []
    w.happen(ev.NodeDraining(w.now, 1, "it leaves"))
    assert started(w.plan()) == [second]
    assert w.ledger.leases[w.lease_of(second)].gpus == (1,)


def test_a_waiting_call_starts_on_another_node_when_its_own_is_lost_before_its_end() -> None:
    w = two_nodes(first_ends_at=1000)  # ns: nothing starts there any more
    call = w.submit(kind=Kind.CALL, key="service:b")
    assert started(w.plan()) == []
    w.happen(ev.NodeLost(w.now, 1, "gone"))
    assert started(w.plan()) == [call]
