"""Snapshots of sessions without an image, and the bounds of a node's snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.executor_rig import as_an_ordinary_user
from helpers.small_folder import in_a_small_folder
from helpers.snapshot_rig import SnapshotRig

from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.protocol.message import SnapshotOrder


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    def made(**settings: Any) -> SnapshotRig:
        rig = SnapshotRig(tmp_path, **settings)
        request.addfinalizer(rig.close)
        return rig

    return made


@pytest.mark.parametrize("kind", ["process", "process, trusted", "bwrap"])
def test_the_directory_of_a_session_is_what_its_snapshot_holds(make: Any, kind: str) -> None:
    backend, _, trusted = kind.partition(", ")
    found = as_an_ordinary_user(SandboxSettings())
    if backend not in (found.trusted if trusted else found.untrusted):
        pytest.skip(f"{kind}: {found.why_not.get(backend)}")
    rig, spec = make(), {"backend": backend, "trusted": bool(trusted)}
    session = rig.start(**spec)
    rig.out(session, "echo a >a; mkdir b; ln -s ../a b/link; chmod 750 b; echo t >$TMPDIR/t; "
                     "umask 077; echo s >secret; chmod 640 a; touch -d @1000 a",
            trusted=bool(trusted))
    name = rig.take(session)
    rig.out(session, "echo later >>a", trusted=bool(trusted))
    copies = [rig.start(snapshot=name, **spec) for _ in range(2)]
    for number, copy in enumerate(copies):
        look = "cat a b/link $TMPDIR/t secret; stat -c '%a %Y' b a secret | cut -d' ' -f1"
        assert rig.out(copy, f"{look}; echo {number} >>a; wc -l <a", trusted=bool(trusted)).split(
            ) == ["a", "a", "t", "s", "750", "640", "600", "2"]
    fork = rig.start(origin=copies[0], **spec)
    assert rig.out(fork, "cat a", trusted=bool(trusted)).split() == ["a", "0"]


def test_what_was_used_least_recently_goes_first_and_what_is_in_use_stays(make: Any) -> None:
    rig = make(snapshots_max=2)
    spec = {"trusted": True, "backend": "process"}
    session = rig.start(**spec)
    first, second = rig.take(session), rig.take(session)
    copy = rig.start(snapshot=first, **spec)
    third = rig.take(session)
    assert rig.told(second, "gone")
    assert {path.name for path in rig.folders()} == {
        rig.folder_of(first).name, rig.folder_of(third).name}
    other = rig.start(snapshot=third, **spec)
    _, outcome = rig.try_snapshot(session)
    assert outcome.state is ActionState.FAILED
    assert "keeps 2 of at most snapshots_max = 2 snapshots" in outcome.reason
    rig.close_session(copy)
    rig.take(session)
    assert rig.told(first, "gone")
    rig.close_session(other)


def test_space_is_bounded(make: Any) -> None:
    rig = make(snapshots_mib=8)
    session = rig.start(trusted=True, backend="process")
    rig.out(session, "dd if=/dev/urandom of=large bs=1M count=5 2>/dev/null", trusted=True)
    first = rig.take(session)
    second = rig.take(session)
    assert rig.told(first, "gone") and rig.told(second, "held").mib in (5, 6)
    rig.out(session, "dd if=/dev/urandom of=larger bs=1M count=5 2>/dev/null", trusted=True)
    _, outcome = rig.try_snapshot(session)
    assert outcome.state is ActionState.FAILED
    assert "a node keeps snapshots_mib = 8 MiB of snapshots" in outcome.reason
    rig.until(lambda: [path.name for path in rig.folders()] == [rig.folder_of(second).name])


def test_a_full_scratch_folder_is_named(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from tangram_hpc.sandbox.files import frozen_files, scratch
        scratch.make(sys.argv[1] + "/origin")
        try:
            frozen_files.freeze(sys.argv[1] + "/origin", sys.argv[1] + "/frozen")
        except frozen_files.Unfrozen as error:
            print(error)
        """
    assert in_a_small_folder(tmp_path, "64k,nr_inodes=5", code) == (
        "No space left on device in the node's scratch folder\n")


def test_a_snapshot_that_nobody_uses_goes_after_its_time(make: Any) -> None:
    rig = make(snapshot_idle_s=0.2)
    spec = {"trusted": True, "backend": "process"}
    session = rig.start(**spec)
    used = rig.take(session)
    copy = rig.start(snapshot=used, **spec)
    unused = rig.take(session)
    assert rig.told(unused, "gone")
    assert rig.folder_of(used).exists()
    rig.close_session(copy)
    assert rig.told(used, "gone")
    rig.until(lambda: not rig.folders())


def test_a_broker_that_came_back_hears_of_all_snapshots_and_of_those_that_are_missing(
        make: Any) -> None:
    rig = make()
    spec = {"trusted": True, "backend": "process"}
    session = rig.start(**spec)
    first, second = rig.take(session), rig.take(session)
    held = [rig.told(name, "held") for name in (first, second)]
    assert [one.session for one in held] == [session, session]
    rig.order(first, "remove")
    name = rig.new_name()
    rig.loop.call_soon(rig.executor.open_session, SessionSpec(99, snapshot=name, **spec))
    wanted = rig.told(name, "wanted")
    assert rig.executor.snapshot_reports() == [held[1], wanted]
    rig.order(second, "publish")
    files = rig.told(second, "published").files

    async def fetching() -> Any:
        rig.executor.order_snapshot(SnapshotOrder(name, "fetch", files))
        return rig.executor.snapshot_reports()

    assert rig.loop.run_until_complete(fetching()) == [held[1]], "it is on its way"
    rig.until(lambda: 99 in rig.up)
    assert rig.executor.snapshot_reports() == [held[1], rig.told(name, "held")]
    assert rig.told(name, "held").session == 0
    assert [one.what for one in rig.snapshots if one.name == name] == ["wanted", "held"]
