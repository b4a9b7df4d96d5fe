"""Actions that wait for memory or for a limit of their tenant start when either is free again."""

from __future__ import annotations

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.tenant import TenantSpec


def opened(w: World, mem: int) -> int:
    session = w.session(mem=mem)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    w.plan()
    return session


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit"])
def test_an_action_that_waits_for_memory_starts_when_a_session_closes(placer: str) -> None:
    w = World(placer)
    w.node(mem=100)
    session = opened(w, 60)
    action = w.submit(mem_mib=50)
    assert started(w.plan()) == []
    w.happen(ev.SessionClosed(w.now, session, ""))
    assert started(w.plan()) == [action]


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit"])
def test_an_action_starts_on_any_node_when_its_tenant_holds_less(placer: str) -> None:
    w = World(placer)
    w.happen(ev.TenantDeclared(0, TenantSpec("default", grp_tres=(("cpu", 2),))))
    w.node(cpus=2, complete=False)
    w.node(cpus=4)
    first = w.submit(cpus=2)
    assert started(w.plan()) == [first]
    other = 2 if w.ledger.leases[w.lease_of(first)].node == 1 else 1
    second = w.submit(cpus=2)
    assert started(w.plan()) == []
    w.happen(ev.NodeDraining(w.now, 3 - other, "it leaves"))
    w.plan()
    w.finish(first)
    assert started(w.plan()) == [second]
    assert w.ledger.leases[w.lease_of(second)].node == other
