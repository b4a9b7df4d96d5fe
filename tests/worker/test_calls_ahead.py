"""Calls that are prefetched to a runner: none is lost, run twice or blamed for the end of another
call."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.executor_rig import Rig

from tangram_hpc import LocalCluster
from tangram_hpc.client.functions import pickled_by_value
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import StartAttempt
from tangram_hpc.protocol.payload import FunctionCall, encode


class Ahead(Rig):
    """A rig that prefetches calls."""

    def __init__(self, folder: Path) -> None:
        self.back: list[int] = []
        super().__init__(folder, warm=0)
        self.value(lambda: 0)  # a runner stands

    def returned(self, lease: int) -> None:
        assert lease not in self.done
        self.back.append(lease)

    def chain(self, function: Any, *arguments: tuple[Any, ...]) -> list[int]:
        """Calls of a function that the runner knows, each prefetched behind the one before; returns
        the leases."""
        digest, leases, took = self.store.put(pickled_by_value(function, "function")), [], []

        async def give() -> None:
            for args in arguments:
                self.lease += 1
                after = leases[-1] if leases else 0
                order = StartAttempt(self.lease, Action(self.lease, "t", Kind.FUNCTION),
                                     self.cores[:1], after=after)
                payload = memoryview(encode(FunctionCall(digest, pickle.dumps((args, {})))))
                if after:
                    took.append(self.executor.follow(order, payload))
                else:
                    self.executor.start(order, payload)
                leases.append(self.lease)

        self.value(function, *arguments[0])  # ships it
        self.loop.run_until_complete(give())
        assert all(took)
        return leases


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Ahead]:
    rig = Ahead(tmp_path)
    yield rig
    rig.close()


def test_prefetched_function_calls_run_in_order_in_one_runner(rig: Ahead, tmp_path: Path) -> None:
    def note(n: int) -> int:
        with open(tmp_path / "notes", "a") as file:
            file.write(f"{n} ")
        return os.getpid()

    leases = rig.chain(note, *((n,) for n in range(100)))
    pids = {rig.end(lease)[1].data for lease in leases}
    assert len(pids) == 1 and rig.back == []
    assert (tmp_path / "notes").read_text().split() == ["0", *map(str, range(100))]
    ends = [e[1] for e in rig.events if e[0] == "finished" and e[1] in leases]
    assert ends == leases
    assert [e[1] for e in rig.events if e[0] == "started" and e[1] in leases] == leases


def test_a_runner_that_dies_fails_only_its_running_call(rig: Ahead) -> None:
    def may_die(die: bool) -> int:
        return os._exit(9) if die else 1

    leases = rig.chain(may_die, (False,), (False,), (True,), (False,), (False,))
    assert [rig.end(lease)[0].state for lease in leases[:3]] == [
        ActionState.COMPLETED, ActionState.COMPLETED, ActionState.FAILED]
    assert "exit code 9" in rig.done[leases[2]][0].reason
    rig.until(lambda: sorted(rig.back) == leases[3:])
    assert rig.value(lambda: 2) == 2


def test_calls_prefetched_behind_a_long_call_are_returned_and_never_run(
        rig: Ahead, tmp_path: Path) -> None:
    def write(n: int, s: float) -> None:
        (tmp_path / str(n)).touch()
        time.sleep(s)

    leases = rig.chain(write, (0, 0.01), (1, 0.4), (2, 0), (3, 0))
    rig.until(lambda: len(rig.back) == 2)
    assert leases[1] not in rig.done, "they are returned before the long call ends"
    assert sorted(rig.back) == leases[2:]
    rig.end(leases[1])
    assert rig.value(lambda: 4) == 4  # what it is given next is not taken for one of these
    assert not (tmp_path / "2").exists() and not (tmp_path / "3").exists()
    again = rig.chain(write, (5, 0), (6, 0))
    assert all(rig.end(lease)[0].state is ActionState.COMPLETED for lease in again)


def test_a_prefetched_call_can_be_taken_back_without_harm_to_the_running_one(rig: Ahead) -> None:
    leases = rig.chain(time.sleep, (0.02,), (0,), (0,))

    async def take() -> bool:
        return rig.executor.take_back(leases[1])

    assert rig.loop.run_until_complete(take())
    rig.until(lambda: rig.back == [leases[2]])
    assert rig.end(leases[0])[0].state is ActionState.COMPLETED
    assert leases[1] not in rig.done


def test_no_call_of_a_cluster_is_lost_or_run_twice_when_runners_die(tmp_path: Path) -> None:
    def work(n: int) -> int:
        with open(tmp_path / "log", "a") as file:
            file.write(f"{n}\n")
        if n % 97 == 50:
            os._exit(3)
        if n % 211 == 100:
            time.sleep(0.2)
        return n

    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        for future in [cluster.submit(work, 0) for _ in range(300)]:
            future.result(60)
        futures = {n: cluster.submit(work, n) for n in range(1, 1500)}
        for n, future in futures.items():
            if n % 97 == 50:
                assert "exit code 3" in str(future.exception(60)), n
            else:
                assert future.result(60) == n
    ran = [int(line) for line in (tmp_path / "log").read_text().split()][300:]
    assert sorted(ran) == list(range(1, 1500))


def test_a_kill_ends_no_call_that_its_runner_has_gone_on_to(rig: Ahead, tmp_path: Path) -> None:
    """The worker reads results late: here it does not read while the runner goes on."""
    def write(n: int) -> None:
        (tmp_path / str(n)).touch()
        time.sleep(0.3 if n == 3 else 0)

    async def kill_late(lease: int) -> None:
        while not (tmp_path / "3").exists():
            time.sleep(0.001)  # the loop stands still
        rig.executor.kill(lease, ActionState.CANCELLED, "it was cancelled")

    leases = rig.chain(write, (1,), (2,), (3,), (4,))
    rig.loop.run_until_complete(kill_late(leases[0]))
    assert [rig.end(lease)[0].state for lease in leases[:3]] == [ActionState.COMPLETED] * 3
    rig.until(lambda: rig.back == leases[3:])
    assert rig.value(lambda: 2) == 2


def test_a_runner_that_is_killed_gets_no_other_call(rig: Ahead, tmp_path: Path) -> None:
    """It may end its call, and say so, between the order to kill it and its death."""
    def wait(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.001)

    go, server = tmp_path / "go", rig.executor.fork_server_pid
    rig.value(wait, str(tmp_path))
    killed = rig.begin_function(wait, str(go))
    rig.until(lambda: ("started", killed) in rig.events)
    os.kill(server, signal.SIGSTOP)
    try:
        rig.loop.call_soon(rig.executor.kill, killed, ActionState.CANCELLED, "it was cancelled")
        rig.loop.run_until_complete(asyncio.sleep(0.01))
        go.touch()
        rig.loop.run_until_complete(asyncio.sleep(0.1))
        other = rig.begin_function(wait, str(tmp_path))
        rig.loop.run_until_complete(asyncio.sleep(0.1))
    finally:
        os.kill(server, signal.SIGCONT)
    assert rig.end(killed)[0].state is ActionState.CANCELLED
    assert rig.end(other)[0].state is ActionState.COMPLETED


def test_results_do_not_wait_for_the_end_of_a_long_call_behind_them(tmp_path: Path) -> None:
    """A runner tells of results of one millisecond at once, and of none while it is at a call."""
    with LocalCluster(cpus=1, home=tmp_path) as cluster:
        for _ in range(20):
            for _ in cluster.map(time.sleep, [0] * 300):
                pass  # such calls are expected to be short, and so they are prefetched
            *short, long = [cluster.submit(time.sleep, s) for s in (0, 0, 0, 90)]
            for future in short:
                future.result(30)
            long.cancel()
