"""Processes that wait for work, for each kind of box, and how many are built at once."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.executor_rig import Rig

from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.process_frames import SandboxSpec
from tangram_hpc.sandbox.manager import process_supervisor
from tangram_hpc.sandbox.manager.pools import Pool, StartLimiter


class Yard:
    """Makes processes by number; a pool and the limit on starts know no more of one."""

    def __init__(self, limit: int = 100) -> None:
        self.start_limiter = StartLimiter(limit)
        self.made: list[Any] = []
        self._numbers = itertools.count(1)

    def fork(self) -> Any:
        self.made.append(SimpleNamespace(number=next(self._numbers)))
        return self.made[-1]

    def pool(self, limit: int = 8, warm: int = 0) -> Pool:
        return Pool(self.fork, self.start_limiter, limit, warm)

    def boot(self, pool: Pool, process: Any) -> None:
        """As its owner does when one says that it is ready."""
        self.start_limiter.over(process)
        pool.booted(process)
        pool.free.append(process)


# ---- starts ------------------------------------------------------------------------------------


def test_starts_are_limited_and_made_in_order() -> None:
    yard, begun = Yard(2), []

    def ask(name: str) -> None:
        def begin() -> Any:
            begun.append(name)
            return yard.fork()
        yard.start_limiter.ask(begin)

    for name in "abcd":
        ask(name)
    assert begun == ["a", "b"]
    yard.start_limiter.over(yard.made[1])
    assert begun == ["a", "b", "c"]
    yard.start_limiter.over(yard.made[1])  # its end, after its boot, frees no second place
    yard.start_limiter.over(SimpleNamespace(number=99))
    assert begun == ["a", "b", "c"]
    yard.start_limiter.over(yard.made[0])
    assert begun == ["a", "b", "c", "d"]


def test_a_start_that_is_no_longer_wanted_takes_no_slot() -> None:
    yard = Yard(1)
    yard.start_limiter.ask(yard.fork)
    asked: list[str] = []
    for name in "xy":
        yard.start_limiter.ask(lambda name=name: asked.append(name))  # type: ignore[misc]
    yard.start_limiter.ask(yard.fork)
    assert len(yard.made) == 1 and asked == []
    yard.start_limiter.over(yard.made[0])
    assert asked == ["x", "y"] and len(yard.made) == 2


# ---- pools -------------------------------------------------------------------------------------


def test_a_pool_builds_its_warm_processes_and_one_for_each_waiting_action() -> None:
    yard = Yard()
    pool = yard.pool(limit=4, warm=2)
    pool.warm_up()
    pool.warm_up()  # what is coming is not asked for again
    assert len(yard.made) == 2
    pool.waiting.extend(range(9))  # type: ignore[arg-type]
    pool.warm_up()
    assert len(yard.made) == 4, "never more than its limit"
    for process in yard.made:
        pool.booted(process)
    pool.warm_up()
    assert len(yard.made) == 4


def test_a_queued_start_is_not_requested_twice() -> None:
    yard = Yard(1)
    pool = yard.pool(warm=3)
    pool.warm_up()
    pool.warm_up()
    for n in range(3):
        assert len(yard.made) == n + 1
        yard.boot(pool, yard.made[n])
    assert len(yard.made) == 3 == len(pool.free)


def test_a_lost_process_is_replaced_and_a_process_given_away_makes_room() -> None:
    yard = Yard()
    pool = yard.pool(limit=2, warm=2)
    assert pool.give_away() is None
    pool.warm_up()
    for process in list(yard.made):
        yard.boot(pool, process)
    taken = pool.give_away()
    assert taken is yard.made[1] and pool.free == [yard.made[0]]
    pool.warm_up()
    assert len(yard.made) == 3
    assert not pool.lost(yard.made[0]) and pool.free == []
    pool.warm_up()
    assert len(yard.made) == 4


def test_a_pool_reports_when_no_process_can_be_built() -> None:
    yard = Yard(1)
    pool = yard.pool()
    pool.waiting.extend(range(2))  # type: ignore[arg-type]
    pool.warm_up()
    yard.start_limiter.over(yard.made[0])
    assert not pool.lost(yard.made[0]), "another is being tried"
    yard.start_limiter.over(yard.made[1])
    assert pool.lost(yard.made[1])


def test_a_cooled_pool_gives_up_its_idle_processes_and_builds_no_more() -> None:
    yard = Yard()
    pool = yard.pool(warm=2)
    pool.warm_up()
    for process in list(yard.made):
        yard.boot(pool, process)
    assert pool.cool() == yard.made and pool.free == []
    for process in yard.made:
        pool.lost(process)
    pool.warm_up()
    assert len(yard.made) == 2
    pool.waiting.append(1)  # type: ignore[arg-type]
    pool.warm_up()
    assert len(yard.made) == 3


def test_a_cooled_pool_begins_no_process_that_was_asked_for_before() -> None:
    yard = Yard(1)
    pool = yard.pool(warm=3)
    pool.warm_up()
    assert pool.cool() == [] and pool.cooled
    yard.boot(pool, yard.made[0])  # its start makes room for the two that are left
    assert len(yard.made) == 1
    pool.heat(3)
    pool.warm_up()
    assert len(yard.made) == 2 and not pool.cooled


# ---- of a real worker --------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    rig = Rig(tmp_path, warm=2, trusted=True)
    yield rig
    rig.close()


def free(rig: Rig, box: SandboxSpec) -> list[Any]:
    return rig.executor._supervisor._pools[box, ()].free


def test_a_sandbox_that_comes_up_after_its_pool_has_cooled_is_ended(worker: Rig) -> None:
    pool = worker.executor._supervisor.pool(SandboxSpec("process", True, network=False))
    pool.warm_up()
    worker.until(lambda: pool._booting)
    assert pool.cool() == [], "none is ready"
    worker.until(lambda: not pool._booting)
    worker.until(lambda: not pool._size)
    assert not pool.free


def test_each_sandbox_kind_is_kept_warm_from_its_first_use_on(worker: Rig) -> None:
    box = SandboxSpec("process", True, network=False)
    worker.open(1)
    worker.until(lambda: len(free(worker, box)) == 2)
    waiting = list(free(worker, box))
    worker.open(2)
    assert worker.session(2).process in waiting, "it took one that waited"
    worker.until(lambda: len(free(worker, box)) == 2)
    back = worker.shell("echo x >only-mine; ls -A", session=2)[1]
    assert back.stdout == b"only-mine\n"
    assert worker.shell("ls -A", session=1)[1].stdout == b""


def test_only_the_last_used_sandbox_kinds_are_kept_warm(
        worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_supervisor, "_WARM_BOXES", 1)
    first, second = (SandboxSpec("process", True, network=on) for on in (False, True))
    worker.open(1)
    worker.until(lambda: len(free(worker, first)) == 2)
    cold = {process.pid for process in free(worker, first)}
    worker.open(2, network=True)
    worker.until(lambda: len(free(worker, second)) == 2 and not free(worker, first))
    worker.until(lambda: not cold & set(worker.processes()))
    assert worker.shell("echo on", session=1)[1].stdout == b"on\n", "a session keeps its process"
    worker.open(3)
    worker.until(lambda: len(free(worker, first)) == 2 and not free(worker, second))


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")
def test_what_a_command_left_in_shared_memory_is_not_seen_by_the_next(tmp_path: Path) -> None:
    """The sandbox of a pool is emptied after each command; its shared memory goes with itself."""
    rig = Rig(tmp_path, trusted=False, isolation="bwrap")
    rig.shell("echo secret > /dev/shm/x; ls /dev/shm")
    outcome, back = rig.shell("ls -A /dev/shm")
    assert outcome.state is ActionState.COMPLETED and back.stdout == b"", (outcome, back)
    rig.close()
