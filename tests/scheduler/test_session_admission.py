"""Which isolation a session needs: an infeasible session is refused at once with the remedy; a
feasible one opens on a node that has the isolation."""

from __future__ import annotations

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.broker.queries.status import nodes, pending
from tangram_hpc.cli.views.explain_verb import lines
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.isolation import backend_for, preferred
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState, SessionState
from tangram_hpc.scheduler.policy.admission import refusal, refusal_of_session

BARE = {"backends": ("process",), "untrusted": ()}
FULL = {"backends": ("bwrap", "process", "podman"), "untrusted": ("bwrap", "podman")}


def session_refusal(w: World, **fields) -> str:
    return refusal_of_session(w.ledger, w.scheduler.state.placer, SessionSpec(w.id(), **fields))


def action_refusal(w: World, **fields) -> str:
    return refusal(w.ledger, w.scheduler.state.placer, Action(w.id(), "x", **fields))


def test_untrusted_code_is_refused_where_no_backend_isolates_the_users_files() -> None:
    w = World()
    w.node(**BARE)
    for why in (session_refusal(w), action_refusal(w)):
        assert why.startswith("trusted: ") and "trusted=True" in why and "\n" not in why
    assert session_refusal(w, trusted=True) == action_refusal(w, trusted=True) == ""
    assert action_refusal(w, kind=Kind.FUNCTION) == ""  # its trust is its client's affair
    s = w.session(trusted=True)
    assert action_refusal(w, session=s) == ""  # the session was asked
    w.node(**FULL)
    assert session_refusal(w) == action_refusal(w) == ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"backend": "docker"}, "backend: 'docker' is not one of process, bwrap"),
     ({"backend": "enroot"}, "backend: 'enroot' works on no node; there is bwrap, process, podman"),
     ({"backend": "process"},
      "backend: 'process' cannot keep .* take bwrap or podman, or pass trusted=True"),
     ({"backend": "process", "trusted": True, "image": "x"},
      "image: 'process' takes no image like 'x'; take bwrap or podman"),
     ({"backend": "podman"}, "^image: podman builds its sandboxes from an image; name one$"),
     ({"background": "linger"}, "background: 'linger' is not one of stop, share, end"),
     ({"disk_mib": -1}, "negative"), ({"grace_ns": -2}, "negative"), ({"idle_ns": -1}, "negative"),
     ({"backend": "", "image": "debian:12"}, "^$"), ({"backend": "bwrap", "image": "a:1"}, "^$"),
     ({"backend": "process", "trusted": True}, "^$"), ({"background": "share"}, "^$")],
)
def test_an_infeasible_session_is_refused_naming_the_field_and_the_remedy(
        fields, told: str) -> None:
    import re

    w = World()
    w.node(**FULL)
    why = session_refusal(w, **fields)
    assert re.search(told, why) and "\n" not in why


def test_a_session_with_an_image_needs_a_backend_that_takes_images() -> None:
    w = World()
    w.node(backends=("process",), untrusted=("process",))
    assert session_refusal(w, image="x") == (
        "image: no node has a backend that takes 'x'; bwrap takes images, and `tangram doctor` on "
        "a node says what it lacks there")


def test_where_only_a_container_program_isolates_code_it_needs_an_image() -> None:
    w = World()
    w.node(backends=("process", "podman"), untrusted=("podman",))
    assert session_refusal(w, image="debian:12") == session_refusal(w, trusted=True) == ""
    assert session_refusal(w) == ("image: podman builds its sandboxes from an image; name one, or "
                                  "install bubblewrap on the nodes")
    filtered = World()
    filtered.node(backends=("process", "podman"), untrusted=("process", "podman"))
    assert "install bubblewrap on the nodes, or pass network=False" in session_refusal(
        filtered, network="loopback")
    assert action_refusal(w).startswith("trusted: ") and action_refusal(w, trusted=True) == ""
    waits = w.submit()
    w.plan()
    assert not w.ledger.leases, "a command has no image"
    w.node(backends=("podman", "process"), untrusted=("podman", "process"))  # a site prefers podman
    assert session_refusal(w) == action_refusal(w) == ""
    w.plan()
    assert [lease.action for lease in w.ledger.leases.values()] == [waits]


def test_infeasible_sessions_wait_until_all_nodes_have_joined_and_then_end() -> None:
    w = World()
    w.node(complete=False, **BARE)
    assert session_refusal(w) == "" == action_refusal(w)
    never, fits = w.session(), w.session(trusted=True)
    too_big = w.session(mem=10**6, trusted=True)
    inside, loose = w.submit(session=never), w.submit()
    w.plan()
    made = w.happen(ev.NodesComplete(w.now, 1))
    ended = {d.session: d for d in made if isinstance(d, de.AnnounceSessionEnd)}
    assert set(ended) == {never, too_big} and all(d.infeasible for d in ended.values())
    assert ended[never].reason.startswith("trusted:") and "mem" in ended[too_big].reason
    assert replies(made) == {inside: ActionState.CANCELLED, loose: ActionState.FAILED}
    assert w.ledger.sessions[fits].state is not SessionState.WAITING


@pytest.mark.parametrize("placer", ["first-fit", "fcfs:2", "paper", "elastic", "static:1"])
def test_sessions_open_on_nodes_that_offer_their_isolation(placer: str) -> None:
    w = World(placer)
    bare, full = w.node(cpus=8, **BARE), w.node(cpus=2, **FULL)
    homes = {}
    for fields, home in (({}, full), ({"image": "debian:12"}, full), ({"trusted": True}, bare)):
        s = w.session(**fields)
        w.plan()
        w.happen(ev.SessionReady(w.now, s))
        homes[s] = home
    assert {s: w.ledger.sessions[s].node for s in homes} == homes
    w = World(placer)
    w.node(cpus=8, **BARE)
    full = w.node(cpus=1, **FULL)
    guarded = [w.submit() for _ in range(3)]
    assert len(started(w.plan())) == 1  # CPUs are free, but not where it may run
    assert [x.node for x in w.ledger.leases.values()] == [full]
    w.submit(trusted=True)
    w.plan()
    if placer in ("first-fit", "paper", "elastic"):  # the others keep the order of arrival
        assert len(w.ledger.leases) == 2
    while waiting := [a for a in guarded if a in w.ledger.actions and w.lease_of(a)]:
        w.finish(waiting[0])
        w.plan()
    assert all(w.ledger.actions[a].state is ActionState.COMPLETED for a in guarded)
    assert {e.node for e in w.events if isinstance(e, ev.LeaseGranted)
            and e.action in guarded} == {full}


def test_a_session_without_free_memory_waits_with_reason_Memory() -> None:
    w = World()
    w.node(mem=100)
    first, second, third = w.session(mem=60), w.session(mem=60), w.session(mem=10)
    inside = w.submit(session=second)
    w.plan()
    told = pending(w.scheduler, "j", w.now)
    assert [(p["id"], p["reason"], p["mem_mib"]) for p in told["pending_sessions"]] == [
        (show(second), "Memory", 60), (show(third), "Priority", 10)]
    assert [p["reason"] for p in told["pending"]] == ["SessionMemory"]
    assert explain(w.scheduler, w.now, show(inside))["reason"] == "SessionMemory"
    why = explain(w.scheduler, w.now, show(second))
    assert (why["reason"], why["ahead"], why["most_free_mib"]) == ("Memory", 0, 40)
    assert any("Memory" in line for line in lines(why))
    assert "on n1" in lines(explain(w.scheduler, w.now, show(first)))[1]
    fork = w.session(mem=1, origin=first)
    assert explain(w.scheduler, w.now, show(fork))["reason"] == "OriginBusy"
    w.happen(ev.SessionReady(w.now, first))
    fork = w.session(mem=70, origin=first)
    w.plan()
    assert explain(w.scheduler, w.now, show(fork))["reason"] == "Memory"
    assert nodes(w.scheduler, "j", 0)["nodes"][0]["untrusted"] == ["model"]
    reserving = World("static:4")
    reserving.node(cpus=4)
    reserving.session(), reserving.session()
    reserving.plan()
    assert pending(reserving.scheduler, "j", 0)["pending_sessions"][0]["reason"] == "Resources"


def test_a_session_gets_the_best_backend_that_fits_its_spec() -> None:
    node = NodeSpec("n", "h", (0,), 1, **FULL)
    assert backend_for(node, SessionSpec(1)) == "bwrap"
    assert backend_for(node, SessionSpec(1, image="debian:12")) == "bwrap"
    assert backend_for(node, SessionSpec(1, trusted=True, backend="process")) == "process"
    assert backend_for(node, SessionSpec(1, backend="process")) == ""
    assert backend_for(node, SessionSpec(1, backend="podman")) == "", "it needs an image"
    preferring = NodeSpec("n", "h", (0,), 1, backends=("podman", "bwrap"),
                          untrusted=("podman", "bwrap"))
    assert backend_for(preferring, SessionSpec(1)) == "bwrap"
    assert backend_for(preferring, SessionSpec(1, image="debian:12")) == "podman"
    assert preferred(("a", "b", "c"), "b") == ("b", "a", "c")
    assert preferred(("a",), "b") == ("a",)
