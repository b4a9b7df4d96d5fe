"""Snapshots and forks of sessions that write their image: they diverge, outlive the session that
they came from, and are removed when nobody needs them."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.image_session_rig import (
    found_backends,
    image_sessions_work,
    small_image,
    with_bwrap,
    with_image,
)
from helpers.snapshot_rig import SnapshotRig

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import SnapshotCall
from tangram_hpc.sandbox.files import root_record
from tangram_hpc.storage.store import FolderStore

__all__ = ["found_backends", "image_sessions_work", "small_image"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, image: Path) -> Iterator[SnapshotRig]:
    yield from with_image(SnapshotRig(tmp_path_factory.mktemp("rig"), trusted=False), image)


def test_sessions_begin_with_what_a_snapshot_holds_and_diverge(rig: SnapshotRig) -> None:
    first = rig.start()
    rig.out(first, "echo new >/testbed/new; rm /testbed/old; rm -r /testbed/folder; "
                   "mkdir /testbed/folder; echo mine >note; echo t >/tmp/t; mkdir /opt")
    name = rig.take(first)
    rig.out(first, "echo later >/testbed/new; echo later >note; touch /testbed/later")
    one, two = rig.start(snapshot=name), rig.start(snapshot=name)
    rig.close_session(first)
    look = "ls /testbed /testbed/folder; cat /testbed/new note /tmp/t; ls -d /opt"
    expected = ["/testbed:", "folder", "new", "/testbed/folder:", "new", "mine", "t", "/opt"]
    assert rig.out(one, look).split() == expected
    rig.out(one, "echo one >/testbed/new; echo one >note; touch /testbed/folder/one; rmdir /opt")
    assert rig.out(two, look).split() == expected
    three = rig.start(snapshot=name)
    assert rig.out(three, look).split() == expected
    for session in (one, two, three):
        rig.close_session(session)
    rig.order(name, "remove")
    rig.until(lambda: not rig.folders())


def test_the_mode_of_the_root_is_kept(rig: SnapshotRig) -> None:
    session, look, names = rig.start(), "stat -c %a /", []
    assert rig.out(session, look) == "755\n"
    for mode in ("711", "1777", "755", "0"):
        rig.out(session, f"chmod {mode} /")  # which is its only change
        names.append(rig.take(session))
        expected = f"{mode}\n" if mode != "0" else "700\n"  # user 0 enters it in any case
        for one in (rig.start(snapshot=names[-1]), rig.start(origin=session)):
            assert rig.out(one, look) == expected
            names.append(rig.take(one))
            again = rig.start(snapshot=names[-1])
            assert rig.out(again, look) == expected
            rig.close_session(one)
            rig.close_session(again)
    rig.close_session(session)
    for name in names:
        rig.order(name, "remove")
    rig.until(lambda: not rig.folders())


def test_a_snapshot_of_a_session_from_a_snapshot_stacks(rig: SnapshotRig) -> None:
    """The layers stay after the lower snapshot is removed, while a session or a snapshot needs
    them."""
    session, names = rig.start(), []
    for step in range(4):
        rig.out(session, f"echo {step} >/testbed/{step}; rm -f /testbed/old; "
                         f"test {step} = 0 || rm /testbed/{step - 1}")
        names.append(rig.take(session))
        rig.close_session(session)
        session = rig.start(snapshot=names[-1])
    record = root_record.recorded(str(rig.place(session)))
    assert record is not None and len(record.layers) == (0 if record.way == "copy" else 4)
    for name in names:
        rig.order(name, "remove")
    rig.until(lambda: not rig.executor._snapshots._by_name)
    rig.kill_init(session)  # the next one needs the layers too
    assert rig.out(session, "ls /testbed").split() == ["3", "folder"]
    assert rig.folders()
    rig.close_session(session)
    rig.until(lambda: not rig.folders())


def test_forks_diverge_over_one_frozen_layer(rig: SnapshotRig) -> None:
    session = rig.start()
    rig.out(session, "echo base >/testbed/base; rm /testbed/old; echo home >note")
    forks = [rig.start(origin=session) for _ in range(6)]
    record = root_record.recorded(str(rig.place(forks[0])))
    if record is not None and record.way != "copy":
        assert len(rig.folders()) == 1, "each fork copied the layer"
    for number, fork in enumerate(forks):
        rig.out(fork, f"echo {number} >/testbed/base; echo {number} >note; touch /testbed/{number}")
    rig.out(session, "echo changed >/testbed/base")
    for number, fork in enumerate(forks):
        assert rig.out(fork, "cat /testbed/base note; ls /testbed").split() == [
            str(number), str(number), *sorted([str(number), "base", "folder"])]
    late = rig.start(origin=session)
    assert rig.out(late, "cat /testbed/base note").split() == ["changed", "home"]
    for fork in (*forks, late, session):
        rig.close_session(fork)
    rig.until(lambda: not rig.folders())


def test_a_session_from_a_snapshot_moves_with_all_its_layers(rig: SnapshotRig) -> None:
    first = rig.start()
    rig.out(first, "echo low >/testbed/low; rm /testbed/old; rm -r /testbed/folder; "
                   "mkdir /testbed/folder")
    name = rig.take(first)
    rig.close_session(first)
    session = rig.start(snapshot=name, movable=True)
    rig.out(session, "echo high >/testbed/high; rm /testbed/low; echo low >/testbed/again")
    files = rig.packed_files(session)
    rig.order(name, "remove")
    rig.until(lambda: not rig.folders())  # the archive has all that it needs
    moved = rig.start(movable=True, files=files)
    look = "ls /testbed /testbed/folder"
    expected = ["/testbed:", "again", "folder", "high", "/testbed/folder:"]
    assert rig.out(moved, look).split() == expected
    late = rig.take(moved)  # copies the layers, because those of `moved` are removed with it
    rig.close_session(moved)
    again = rig.start(snapshot=late)
    assert rig.out(again, look).split() == expected
    rig.close_session(again)
    rig.order(late, "remove")
    rig.until(lambda: not rig.folders())


@pytest.mark.parametrize("background", ["stop", "share", "run"])
def test_a_snapshot_shows_one_instant_of_what_runs_in_the_background(rig: SnapshotRig,
                                                                     background: str) -> None:
    session = rig.start(background=background)
    rig.out(session, "while :; do echo x >>/testbed/a; echo x >>/testbed/b; done & "
                     "until test -s /testbed/b; do :; done")
    wrote = rig.place(session) / "changes/testbed/a"
    name = rig.take(session)
    copy = rig.start(snapshot=name)
    counts = rig.out(copy, "stat -c %s /testbed/a /testbed/b").split()
    assert 0 <= int(counts[0]) - int(counts[1]) <= 2, "the files are of different instants"
    size, before = wrote.stat().st_size, len(rig.events)
    if background == "share":
        rig.until(lambda: wrote.stat().st_size > size)  # it goes on as before
    elif background == "run":  # as before, it waits for a lease once it has used its share of CPU
        rig.until(lambda: ("wants", session) in rig.events[before:])
    rig.out(session, f"until test $(stat -c %s /testbed/a) -gt {size}; do :; done")
    rig.close_session(session)
    rig.close_session(copy)
    rig.order(name, "remove")
    rig.until(lambda: not rig.folders())


def test_hostile_files_are_frozen_as_they_are_and_lead_nowhere(rig: SnapshotRig, tmp_path: Path
                                                               ) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "theirs").write_text("theirs")
    session = rig.start()
    rig.out(session, f"cd /testbed; cp /usr/bin/id id; chmod 6755 id; mkfifo pipe; ln id hard; "
                     f"mknod dev c 1 3; ln -s {target} out; ln -s {target}/theirs file; "
                     f"ln -s {target} /session/out; mkdir -p shut/in; echo s >shut/in/s; "
                     "chmod 0 shut/in/s shut/in shut; rm -r folder; ln -s / folder; "
                     "touch \"$(printf '/testbed/new\\nline')\"")
    look = ("cd /testbed; ls; stat -c '%a %F' id pipe hard out file shut shut/in shut/in/s; "
            "readlink out file folder /session/out; cat shut/in/s; ./id -u")
    seen = rig.out(session, look)
    name = rig.take(session)
    copy = rig.start(snapshot=name)
    assert rig.out(copy, look) == seen
    outcome, _ = rig.shell("echo mine >/testbed/file; echo mine >/session/out/new; "
                           "echo mine >>/testbed/folder/etc/passwd; rm -rf /testbed/shut",
                           session=copy)
    assert outcome.state in (ActionState.COMPLETED, ActionState.FAILED)
    assert [p.name for p in target.iterdir()] == ["theirs"]
    assert (target / "theirs").read_text() == "theirs"
    for path in rig.folder_of(name).rglob("*"):
        about = path.lstat()
        assert not stat.S_ISBLK(about.st_mode)
        assert not stat.S_ISCHR(about.st_mode) or about.st_rdev == 0, "a device was made"
    rig.close_session(copy)
    rig.close_session(session)
    rig.order(name, "remove")
    rig.until(lambda: not rig.folders())


def test_directories_too_deep_to_copy_refuse_the_snapshot_in_one_line(rig: SnapshotRig) -> None:
    session = rig.start()
    rig.out(session, "cd /testbed; i=0; while test $i -lt 60; do "
                     f"mkdir {'a' * 70}; cd {'a' * 70}; i=$((i+1)); done")
    _, outcome = rig.try_snapshot(session)
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("snapshot: cp: ")
    said = outcome.reason.removesuffix(" (os error 36)")  # which the cp of uutils adds
    assert said.endswith("File name too long") and len(outcome.reason) < 400
    rig.until(lambda: not rig.folders())
    rig.close_session(session)


def kill_while_freezing(rig: SnapshotRig, session: int, patch: pytest.MonkeyPatch,
                        next_up: bool = False) -> None:
    """Kills the session's init when its files are frozen next; the freezing ends after its
    death, or with `next_up` when the next init is up."""
    one, cache = rig.session(session), rig.executor._cache
    process, freeze = one.process, cache.freeze

    def late(origin: str, folder: str, then: Any) -> None:
        assert process is not None
        patch.undo()
        os.kill(process.pid, signal.SIGKILL)

        def when_dead() -> None:
            if one.process is process or (next_up and not one.up):
                rig.loop.call_later(0.005, when_dead)
            else:
                freeze(origin, folder, then)

        when_dead()

    patch.setattr(cache, "freeze", late)


def test_an_init_that_dies_meanwhile_refuses_the_snapshot_and_the_session_goes_on(
        rig: SnapshotRig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = rig.start()
    rig.out(session, "echo kept >/testbed/kept")
    kill_while_freezing(rig, session, monkeypatch)
    name, outcome = rig.try_snapshot(session)
    assert outcome.state is ActionState.FAILED
    assert outcome.reason == "snapshot: its sandbox ended meanwhile"
    rig.until(lambda: not rig.folders())
    assert rig.told(name, "gone")
    assert rig.out(session, "cat /testbed/kept") == "kept\n"
    name = rig.take(session)
    rig.close_session(session)
    rig.order(name, "remove")
    rig.until(lambda: not rig.folders())


@pytest.mark.parametrize("next_up", [False, True])
def test_forks_wait_for_the_next_init_if_one_dies_meanwhile(
        rig: SnapshotRig, monkeypatch: pytest.MonkeyPatch, next_up: bool) -> None:
    session = rig.start()
    rig.out(session, "echo kept >/testbed/kept")
    record = root_record.recorded(str(rig.place(session)))
    if record is None or record.way == "copy":
        pytest.skip("forks freeze nothing here")
    kill_while_freezing(rig, session, monkeypatch, next_up)
    fork = rig.start(origin=session)
    assert rig.session(session).deaths == 1
    assert rig.out(fork, "cat /testbed/kept") == "kept\n"
    rig.close_session(fork)
    rig.close_session(session)
    rig.until(lambda: not rig.folders())


def test_nothing_is_left_of_a_snapshot_whose_session_is_closed_or_that_is_cancelled(
        rig: SnapshotRig) -> None:
    session = rig.start()
    rig.out(session, "echo x >/testbed/x")
    name = rig.new_name()
    lease = rig.begin(SnapshotCall(name), Kind.FILE, session=session, cores=())
    rig.loop.call_soon(rig.executor.kill, lease, ActionState.CANCELLED, "by its client")
    assert rig.end(lease)[0].state is ActionState.CANCELLED
    assert rig.out(session, "cat /testbed/x") == "x\n"
    lease = rig.begin(SnapshotCall(rig.new_name()), Kind.FILE, session=session, cores=())
    rig.close_session(session)
    assert rig.end(lease)[0].state in (ActionState.CANCELLED, ActionState.FAILED)
    rig.until(lambda: not rig.folders() and not rig.executor._snapshots._by_name)


def test_another_node_fetches_a_snapshot_once(tmp_path: Path, image: Path) -> None:
    """With the layers of the snapshots below it, which that node does not have."""
    def rig_of(name: str) -> SnapshotRig:
        rig = SnapshotRig(tmp_path / name, trusted=False)
        rig.image, rig.executor._cache._store = str(image), store
        return rig

    store = FolderStore(tmp_path / "shared")
    first = rig_of("first")
    low = first.start()
    first.out(low, "echo low >/testbed/low; rm -r /testbed/folder; echo mine >note")
    middle = first.start(snapshot=first.take(low))
    first.out(middle, "echo high >/testbed/high; rm /testbed/old")
    name = first.take(middle)
    first.order(name, "publish")
    files = first.told(name, "published").files
    first.close()
    second = rig_of("second")
    SnapshotRig.last += 2
    numbers = SnapshotRig.last - 1, SnapshotRig.last
    for number in numbers:
        spec = SessionSpec(number, image=str(image), snapshot=name, trusted=False)
        second.loop.call_soon(second.executor.open_session, spec)
    second.told(name, "wanted")
    second.order(name, "fetch", files=files, image=str(image))
    second.until(lambda: second.up >= set(numbers))
    assert [one.what for one in second.snapshots] == ["wanted", "held"]
    for number in numbers:
        assert second.out(number, "ls /testbed; cat note").split() == ["high", "low", "mine"]
    lost = SnapshotRig.last = SnapshotRig.last + 1
    unknown = second.new_name()
    second.loop.call_soon(second.executor.open_session, SessionSpec(
        lost, image=str(image), snapshot=unknown, trusted=False))
    second.told(unknown, "wanted")
    second.order(unknown, "missing", why="it was removed")
    second.until(lambda: lost in second.down)
    assert second.down[lost] == f"snapshot: {unknown}: it was removed"
    second.close()


@pytest.mark.parametrize("way", ["copy", "fuse"])
def test_snapshots_work_in_the_other_ways(way: str, tmp_path: Path, image: Path) -> None:
    rig = SnapshotRig(tmp_path, trusted=False)
    rig.image = str(image)
    supervisor = rig.executor._supervisor
    supervisor.backends = with_bwrap(supervisor.backends, root=way)
    number = rig.ask()
    if number in rig.down:
        rig.close()
        pytest.skip(rig.down[number])
    rig.out(number, "echo new >/testbed/new; rm /testbed/old; rm -r /testbed/folder")
    name = rig.take(number)
    copy = rig.start(snapshot=name)
    fork = rig.start(origin=copy)
    rig.out(copy, "touch /testbed/copy")
    rig.out(fork, "touch /testbed/fork")
    assert rig.out(copy, "ls /testbed").split() == ["copy", "new"]
    assert rig.out(fork, "ls /testbed").split() == ["fork", "new"]
    assert rig.out(number, "ls /testbed").split() == ["new"]
    rig.close()


def test_a_chain_of_snapshots_is_bounded(rig: SnapshotRig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rig.start()
    rig.out(first, "touch /testbed/first")
    low = rig.take(first)
    session = rig.start(snapshot=low)
    record = root_record.recorded(str(rig.place(session)))
    if record is None or record.way == "copy":
        pytest.skip("there are no layers here")
    rig.out(session, "touch /testbed/second")
    monkeypatch.setattr(root_record, "LAYERS_MAX", 1)
    _, outcome = rig.try_snapshot(session)
    assert outcome.state is ActionState.FAILED
    assert outcome.reason == ("snapshot: its root has 2 layers of snapshots, and at most 1 are "
                              "possible; begin from an earlier snapshot")
    monkeypatch.undo()
    rig.close_session(session)
    rig.close_session(first)
    rig.order(low, "remove")
    rig.until(lambda: not rig.folders())


@pytest.mark.parametrize("name", ["", "else", "snap-" + "g" * 24])
def test_a_name_that_no_client_makes_is_refused_by_the_worker(rig: SnapshotRig, name: str) -> None:
    """The broker would refuse a worker that reported it, and all sessions of the node with it."""
    session = rig.start()
    lease = rig.begin(SnapshotCall(name), Kind.FILE, session=session, cores=())
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.FAILED and "snapshot: its name" in outcome.reason
    rig.close_session(session)


def test_a_name_that_a_snapshot_has_already_is_refused(rig: SnapshotRig) -> None:
    session = rig.start()
    name = rig.take(session)
    lease = rig.begin(SnapshotCall(name), Kind.FILE, session=session, cores=())
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.FAILED and f"{name} exists already" in outcome.reason
    rig.close_session(session)
    rig.order(name, "remove")
    rig.until(lambda: not rig.folders())
