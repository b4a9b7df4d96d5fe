"""Orders that an executor gets twice, from a broker that came back, do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.executor_rig import Rig

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall


class Once(Rig):
    """A rig whose sessions may be reported as ready and as gone only once."""

    def session_up(self, session: int, image: str = "") -> None:
        assert session not in self.up
        super().session_up(session, image)

    def session_down(self, session: int, reason: str, infeasible: bool = False) -> None:
        assert session not in self.down
        super().session_down(session, reason, infeasible)

    def session_packed(self, session: int, files: str) -> None:
        assert session not in self.packed
        super().session_packed(session, files)

    def pause(self) -> None:
        """Lets the executor handle what comes meanwhile."""
        assert self.value(lambda: 1) == 1


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Once]:
    made = Once(tmp_path)
    yield made
    made.close()


def test_an_open_session_that_is_opened_again_stays_as_it_is(rig: Once) -> None:
    spec = SessionSpec(1, trusted=True)
    for _ in range(2):  # the second order comes while the sandbox is being built
        rig.loop.call_soon(rig.executor.open_session, spec)
    rig.until(lambda: 1 in rig.up)
    rig.shell("echo kept >file", session=1)
    before = rig.session(1)
    rig.loop.call_soon(rig.executor.open_session, spec)
    _, back = rig.shell("cat file", session=1)
    assert back.stdout == b"kept\n" and rig.session(1) is before


def test_a_session_is_closed_once_and_an_unknown_one_is_ignored(rig: Once) -> None:
    rig.open(1)
    for session in (1, 1, 9):
        rig.loop.call_soon(rig.executor.close_session, session)
    rig.until(lambda: 1 in rig.down)
    rig.loop.call_soon(rig.executor.close_session, 1)
    rig.pause()
    assert rig.down == {1: ""}


def test_a_session_is_packed_once_and_a_packed_one_is_not_opened_by_it(rig: Once) -> None:
    rig.open(1, movable=True)
    for _ in range(2):
        rig.loop.call_soon(rig.executor.pack_session, 1)
    rig.until(lambda: bool({*rig.packed, *rig.down}))
    rig.loop.call_soon(rig.executor.pack_session, 1)
    rig.pause()
    assert list(rig.packed) == [1] and not rig.down


def test_an_attempt_is_started_once_and_keeps_its_cpus(rig: Once, tmp_path: Path) -> None:
    go, times = tmp_path / "go", tmp_path / "times"
    call = ExecCall(shell=f"echo x >>{times}; until [ -e {go} ]; do sleep 0.02; done")
    lease = rig.begin(call, Kind.EXEC)
    rig.lease -= 1
    assert rig.begin(call, Kind.EXEC) == lease
    rig.until(times.exists)
    rig.lease -= 1
    rig.begin(call, Kind.EXEC)  # while it runs
    for _ in range(2):
        rig.loop.call_soon(rig.executor.resize, lease, rig.cores[:1])
    rig.pause()
    go.touch()
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.COMPLETED and times.read_text() == "x\n"
    rig.loop.call_soon(rig.executor.kill, lease, ActionState.CANCELLED, "late")
    rig.loop.call_soon(rig.executor.resize, lease, rig.cores[:1])
    rig.pause()


def test_an_attempt_that_is_killed_twice_ends_as_first_ordered(rig: Once) -> None:
    lease = rig.begin(ExecCall(shell="sleep 1000"), Kind.EXEC)
    rig.until(lambda: ("started", lease) in rig.events)
    for state in (ActionState.PREEMPTED, ActionState.CANCELLED):
        rig.loop.call_soon(rig.executor.kill, lease, state, "ordered")
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.PREEMPTED
