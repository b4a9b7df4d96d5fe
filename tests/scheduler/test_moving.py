"""Sessions that move off a drained node: the scheduler by hand and on random histories, and the
sessions' files."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.builders import World, replies, started
from helpers.executor_rig import Rig

from tangram_hpc.accounting.record import fold
from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.broker.sandbox_reports import SandboxReport, event_of_report
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState, NodeState, SessionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms
from tangram_hpc.resources import process_tree
from tangram_hpc.sandbox.files import scratch as folders
from tangram_hpc.sandbox.files import session_archive
from tangram_hpc.scheduler.forecast import forecast
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import refusal_of_session
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage.store import FolderStore

PLACERS = ["elastic", "paper", "first-fit", "fcfs:4", "static:2"]
SECOND = 10**9


def open_one(w: World, **fields: object) -> int:
    session = w.session(movable=True, **fields)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    return session


def drain(w: World, node: int) -> list[de.Decision]:
    w.happen(ev.NodeDraining(w.now, node, "it ends"))
    return w.plan()


def decisions_of(made: list[de.Decision], kind: type) -> list[de.Decision]:
    return [d for d in made if isinstance(d, kind)]


def replayed(w: World) -> Scheduler:
    again = Scheduler(make_placer(w.placer))
    for event in w.events:
        again.handle(event)
    return again


def state(scheduler: Scheduler) -> object:
    ledger = scheduler.ledger
    nodes = [(n.node, n.state, n.sessions, n.leases, n.free_mem_mib, n.cores.free)
             for n in ledger.nodes.values()]
    return ledger.sessions, ledger.actions, ledger.leases, ledger.session_queue, nodes


@pytest.mark.parametrize("placer", PLACERS)
def test_a_session_moves_off_a_drained_node_with_its_files_and_actions(placer: str) -> None:
    w = World(placer)
    first = w.node()
    s = open_one(w)
    second = w.node()
    runs, waits = w.submit(session=s), w.submit(session=s)
    assert started(w.plan()) == [runs]
    assert decisions_of(drain(w, first), de.PackSession) == []  # not while an action runs
    assert replies(w.finish(runs)) == {runs: ActionState.COMPLETED}
    made = w.plan()
    assert decisions_of(made, de.PackSession) == [de.PackSession(first, s)] and not started(made)
    entry = w.ledger.sessions[s]
    assert entry.state is SessionState.MOVING and not decisions_of(made, de.CloseSession)
    assert explain(w.scheduler, w.now, show(waits))["reason"] == "SessionMoving"
    later = w.submit(session=s)
    ahead = forecast(w.scheduler, waits, w.now)
    assert ahead.at is not None and ahead.node == second
    entry.snapshot_nodes = (first,)
    w.happen(ev.SessionPacked(w.now, s, "abc"))
    assert not entry.snapshot_nodes  # its files hold all that it needs
    assert w.ledger.nodes[first].state is NodeState.DRAINED
    assert w.ledger.nodes[first].free_mem_mib == 1024 and not w.ledger.nodes[first].sessions
    made = w.plan()
    (opened,) = decisions_of(made, de.OpenSession)
    assert (opened.node, opened.spec.files, entry.node) == (second, "abc", second)
    assert not started(made)
    assert decisions_of(w.happen(ev.SessionReady(w.now, s)), de.AnnounceSession)
    assert started(w.plan()) == [waits]
    w.finish(waits)
    assert started(w.plan()) == [later]
    usage = fold(w.events).usage
    assert usage.reserved_ns >= 0
    assert state(replayed(w)) == state(w.scheduler)


def test_a_session_that_cannot_move_is_closed_with_the_reason_of_the_drain() -> None:
    w = World()
    first = w.node(mem=1024)
    big, plain = open_one(w, mem=500), w.session()
    w.plan()
    w.happen(ev.SessionReady(w.now, plain))
    w.node(mem=100)  # too small for the big one, ever
    made = drain(w, first)
    assert not decisions_of(made, de.PackSession)
    assert [d.session for d in decisions_of(made, de.CloseSession)] == [big, plain]
    assert w.ledger.sessions[big].closing == "node n1: it ends"


def test_a_session_moves_only_to_a_node_whose_allocation_ends_later() -> None:
    for ends_s, moves in ((100, False), (105, False), (500, True)):
        w = World("elastic")
        w.ledger.margin_ns = 10 * SECOND
        for end in (100, ends_s):
            number = w.ledger.next_node
            w.happen(ev.NodeJoined(w.now, number, NodeSpec(
                f"n{number}", "h", (0, 1), 1024, backends=("model",), untrusted=("model",),
                ends_at_ns=end * SECOND)))
            if number == 1:
                w.happen(ev.NodesComplete(w.now, 1))
                s = open_one(w)
        w.now = 90 * SECOND
        made = w.plan()
        assert bool(decisions_of(made, de.PackSession)) is moves, ends_s
        assert bool(decisions_of(made, de.CloseSession)) is not moves
        assert w.ledger.sessions[s].state is (
            SessionState.MOVING if moves else SessionState.CLOSING)


def start_a_move(w: World) -> tuple[int, int, int]:
    """Returns (session, an action that waits in it, the node that the session leaves)."""
    first = w.node()
    s = open_one(w)
    w.node()
    drain(w, first)
    assert w.ledger.sessions[s].state is SessionState.MOVING
    return s, w.submit(session=s), first


def test_a_failed_pack_or_a_lost_node_ends_a_moving_session() -> None:
    w = World()
    s, waits, _ = start_a_move(w)
    assert replies(w.happen(ev.SessionClosed(w.now, s, "move: too much"))) == {
        waits: ActionState.CANCELLED}
    assert s not in w.ledger.sessions
    w = World()
    s, waits, first = start_a_move(w)
    made = w.happen(ev.NodeLost(w.now, first, "gone"))
    assert replies(made) == {waits: ActionState.CANCELLED}
    assert decisions_of(made, de.AnnounceSessionEnd) == [
        de.AnnounceSessionEnd(s, "node n1: gone", False)]
    w = World()
    s, waits, _ = start_a_move(w)
    w.happen(ev.SessionPacked(w.now, s, "abc"))
    w.plan()
    assert w.ledger.sessions[s].state is SessionState.OPENING
    assert replies(w.happen(ev.NodeLost(w.now, 2, "gone"))) == {waits: ActionState.CANCELLED}


def test_a_client_can_close_a_moving_session() -> None:
    w = World()
    s, waits, first = start_a_move(w)
    made = w.happen(ev.SessionClosing(w.now, s, ""))
    assert decisions_of(made, de.CloseSession) == [de.CloseSession(first, s)]
    assert replies(made) == {waits: ActionState.CANCELLED}
    w.happen(ev.SessionClosed(w.now, s, ""))
    w = World()
    s, _, _ = start_a_move(w)
    w.happen(ev.SessionPacked(w.now, s, "abc"))
    w.happen(ev.SessionClosing(w.now, s, ""))
    assert s not in w.ledger.sessions and not w.ledger.session_queue


def test_a_moving_session_with_a_waiting_action_outlives_its_clients_grace() -> None:
    w = World()
    s, waits, _ = start_a_move(w)
    w.session(mem=1020)
    w.plan()  # takes all of the other node
    w.happen(ev.SessionPacked(w.now, s, "abc"))
    w.happen(ev.ClientLeft(w.now, 1, False, w.now + 1))
    w.now += 5
    w.plan()
    assert w.ledger.sessions[s].state is SessionState.WAITING
    assert w.ledger.actions[waits].state is ActionState.PENDING
    assert explain(w.scheduler, w.now, show(waits))["reason"] == "SessionMemory"


def test_a_fork_waits_for_its_moving_origin_and_can_move_itself() -> None:
    w = World()
    s, waits, _ = start_a_move(w)
    fork = w.session(origin=s, movable=True)
    w.plan()
    w.happen(ev.SessionPacked(w.now, s, "abc"))
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    w.plan()
    w.finish(waits)
    w.plan()
    assert w.ledger.sessions[fork].node == 2
    third = w.node()
    assert not decisions_of(drain(w, 2), de.PackSession)  # the fork is being copied
    w.happen(ev.SessionReady(w.now, fork))
    assert {d.session for d in decisions_of(w.plan(), de.PackSession)} == {s, fork}
    for each in (s, fork):
        w.happen(ev.SessionPacked(w.now, each, "abc"))
    w.plan()
    assert {w.ledger.sessions[x].node for x in (s, fork)} == {third}


def report(w: World, node: int, said: SandboxReport) -> None:
    """A worker reports about a sandbox, and the event that follows happens."""
    event = event_of_report(w.ledger, node, said, w.now)
    if event is not None:
        w.happen(event)


def test_sandbox_reports_count_only_from_the_home_node() -> None:
    w = World()
    s, waits, first = start_a_move(w)
    entry = w.ledger.sessions[s]
    report(w, 2, ms.SandboxPacked(s, "other"))
    assert entry.state is SessionState.MOVING
    report(w, first, ms.SandboxPacked(s, "abc"))
    w.plan()
    assert (entry.state, entry.node, entry.spec.files) == (SessionState.OPENING, 2, "abc")
    report(w, first, ms.SandboxUp(s))
    report(w, first, ms.SandboxDown(s, "late"))
    assert entry.state is SessionState.OPENING
    report(w, 2, ms.SandboxUp(s))
    assert started(w.plan()) == [waits]
    w = World()
    s, _, first = start_a_move(w)
    w.happen(ev.SessionClosing(w.now, s, ""))
    report(w, first, ms.SandboxPacked(s, "abc"))  # packed when it was to be closed
    assert s not in w.ledger.sessions


def test_a_client_that_sets_the_files_of_a_session_is_refused() -> None:
    w = World()
    w.node()
    assert refusal_of_session(w.ledger, w.scheduler.state.placer,
                              SessionSpec(9, files="x")).startswith("files: ")


@pytest.mark.parametrize("placer", PLACERS)
@pytest.mark.parametrize("seed", range(8))
def test_the_invariants_of_session_migration_hold_on_any_history(placer: str, seed: int) -> None:
    """A session has one home node at a time, by the orders alone; nothing runs outside it; nothing
    is lost without a message; a replay gives the same state."""
    rng, w = random.Random(seed), World(placer)
    home: dict[int, int] = {}  # session -> the node on which a sandbox of it may stand
    ended: dict[int, ActionState] = {}
    submitted, moved = [], 0

    def see(made: list[de.Decision]) -> None:
        nonlocal moved
        for d in made:
            if isinstance(d, de.OpenSession):
                assert d.spec.id not in home
                home[d.spec.id] = d.node
                moved += bool(d.spec.files)
            elif isinstance(d, de.PackSession | de.CloseSession):
                assert home[d.session] == d.node
            elif isinstance(d, de.StartLease):
                session = w.ledger.actions[d.action].action.session
                assert not session or home[session] == d.node
            elif isinstance(d, de.AnnounceSessionEnd):
                home.pop(d.session, None)
            elif isinstance(d, de.ReplyToClient):
                assert d.action not in ended
                ended[d.action] = d.outcome.state

    def answer() -> None:
        for s, e in list(w.ledger.sessions.items()):
            if e.state is SessionState.OPENING:
                see(w.happen(ev.SessionReady(w.now, s)))
            elif e.state is SessionState.MOVING:
                if rng.random() < .9:
                    del home[s]
                    see(w.happen(ev.SessionPacked(w.now, s, f"files{s}")))
                else:
                    see(w.happen(ev.SessionClosed(w.now, s, "move: it cannot be read")))
            elif e.state is SessionState.CLOSING and not e.leases:
                see(w.happen(ev.SessionClosed(w.now, s, "")))

    w.node(mem=100)
    for _ in range(150):
        sessions = [s for s, e in w.ledger.sessions.items() if e.state is not SessionState.CLOSING]
        match rng.randrange(10):
            case 0 | 1:
                w.session(mem=rng.choice([10, 40]), movable=rng.random() < .8,
                          parallel=rng.random() < .3)
            case 2 | 3 | 4 if sessions:
                submitted.append(w.submit(rng.choice([1, 2]), rng.choice(sessions)))
            case 5 | 6 if w.ledger.leases:
                see(w.finish(w.ledger.leases[rng.choice(list(w.ledger.leases))].action))
            case 7:
                answer()
            case 8 if rng.random() < .5 and w.ledger.up_nodes():
                w.node(mem=100)
                see(w.happen(ev.NodeDraining(w.now, w.ledger.up_nodes()[0].node, "it ends")))
            case 9 if rng.random() < .2 and w.ledger.draining:
                see(w.happen(ev.NodeLost(w.now, next(iter(w.ledger.draining)), "gone")))
            case 9 if sessions and rng.random() < .2:
                see(w.happen(ev.SessionClosing(w.now, rng.choice(sessions), "")))
        see(w.plan())
    assert state(replayed(w)) == state(w.scheduler)
    w.node(mem=1000)
    for _ in range(200):
        answer()
        for lease in list(w.ledger.leases.values()):
            see(w.finish(lease.action))
        for s, e in list(w.ledger.sessions.items()):
            if e.state is SessionState.IDLE and not e.works:
                see(w.happen(ev.SessionClosing(w.now, s, "")))
        see(w.plan())
    assert not w.ledger.sessions and set(ended) == set(submitted) and moved > 0
    fold(w.events).close()


# ---- the files -----------------------------------------------------------------------------------


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def move(rig: Rig, old: int, new: int) -> None:
    rig.loop.call_soon(rig.executor.pack_session, old)
    rig.until(lambda: old in rig.packed)
    rig.open(new, files=rig.packed[old])


def sleepers(rig: Rig) -> list[int]:
    return [p for p in rig.processes() if b"sleep" in (process_tree.read(f"/proc/{p}/cmdline")
                                                       or b"")]


def test_a_migrated_session_has_the_packed_files_with_their_modes_and_links(rig: Rig) -> None:
    rig.open(1)
    made = rig.shell("mkdir -p d/e; echo text > d/e/f; chmod 750 d; ln -s /etc/passwd link; "
                     "ln d/e/f hard; truncate -s 3M holes; mkfifo pipe; echo tmp > $TMPDIR/t; "
                     "touch -d 2001-01-01 old; sleep 300 &", session=1)
    assert made[0].state is ActionState.COMPLETED, made
    assert sleepers(rig)
    move(rig, 1, 2)
    assert rig.down == {} and not sleepers(rig)
    back = rig.shell("cat d/e/f $TMPDIR/t; stat -c %a d; readlink link; stat -c '%h %s' hard holes;"
                     " stat -c '%F %Y' pipe old", session=2)
    text = back[1].stdout.decode()
    assert text.startswith("text\ntmp\n750\n/etc/passwd\n2 5\n1 3145728\nfifo "), text
    assert "regular empty file 978" in text, text
    move(rig, 2, 3)  # and once more
    assert rig.shell("cat d/e/f", session=3)[1].stdout == b"text\n"
    # `os.walk` does not mind folders that go while it walks
    rig.until(lambda: sum(folder.endswith("/home") and "d" in names
                          for folder, names, _ in os.walk(rig.scratch)) == 1)


def test_a_session_that_cannot_be_packed_or_unpacked_names_the_reason(
        rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.loop.call_soon(rig.executor.open_session, SessionSpec(8, trusted=True, files="0" * 64))
    rig.until(lambda: 8 in rig.down)
    assert "no payload 000000000000" in rig.down[8]
    monkeypatch.setattr(session_archive, "ARCHIVE_MAX", 1 << 20)
    rig.open(1)
    rig.shell("head -c 2000000 /dev/zero > big", session=1)
    rig.loop.call_soon(rig.executor.pack_session, 1)
    rig.until(lambda: 1 in rig.down)
    assert rig.down[1] == "move: its files are more than 1 MiB" and not rig.packed
    rig.open(2)
    rig.loop.call_soon(rig.executor.pack_session, 2)  # closed on its way
    rig.loop.call_soon(rig.executor.close_session, 2)
    rig.until(lambda: 2 in rig.down)
    assert rig.down[2] == "" and not rig.packed


def test_a_session_archive_reads_and_writes_nothing_outside_the_session(tmp_path: Path) -> None:
    """Links to outside are kept as links; nothing outside is read or written."""
    store, outside = FolderStore(tmp_path / "store"), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    folders.make(source)
    home = Path(folders.home(source))
    os.symlink(outside, home / "out")
    os.symlink("../../outside", home / "up")
    (home / "-rf").write_text("a name")
    (home / "new\nline").write_text("another")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(home / "socket"))
    digest = session_archive.pack(source, store, lambda: False)
    assert b"secret" not in store.get(digest)
    session_archive.unpack(digest, target, store, lambda: False)
    there = Path(folders.home(target))
    assert sorted(os.listdir(there)) == ["-rf", "new\nline", "out", "up"]
    assert os.readlink(there / "up") == "../../outside"
    assert os.listdir(outside) == ["secret"]
    with pytest.raises(session_archive.ArchiveError):
        session_archive.unpack(store.put(b"no tar"), str(tmp_path / "t2"), store, lambda: False)
    with pytest.raises(session_archive.ArchiveError):
        session_archive.pack(source, store, lambda: True)
    with pytest.raises(InvalidInput):
        session_archive.unpack("0" * 64, str(tmp_path / "t3"), store, lambda: False)
